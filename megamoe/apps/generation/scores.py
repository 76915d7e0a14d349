"""BLEU and chrF of translations by sacreBLEU, with the signatures that make scores comparable (Post 2018)."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from megamoe.apps.translation.pairs import normalize_language
from megamoe.errors import UserError

# Those that need no download. ja-mecab and ko-mecab need further packages of sacreBLEU.
Tokenize = Literal["13a", "zh", "char", "intl", "none", "ja-mecab", "ko-mecab"]
WITHOUT_SPACES = ("ja", "km", "lo", "my", "th")  # languages that 13a takes for one word a sentence


@dataclass(frozen=True)
class Score:
    """A score of a corpus, from 0 to 100. details: sacreBLEU's line, such as the precisions of BLEU."""

    score: float
    signature: str
    details: str


def default_tokenize(language: str) -> Tokenize:
    """Return BLEU's tokenisation for a target language: zh for Chinese, char where words have no spaces.

    language: in any spelling that `normalize_language` takes, such as zh_CN or zh-cn.
    """
    first = (normalize_language(language) or language).split("_")[0]
    return "zh" if first == "zh" else "char" if first in WITHOUT_SPACES else "13a"


def metrics_of(tokenize: Tokenize) -> dict[str, Any]:
    """Return sacreBLEU's metrics by name: BLEU, chrF (chrF2) and chrF++ (chrF2++).

    Raises:
        UserError: if sacreBLEU, or what it needs for this tokenisation, is not installed.
    """
    if tokenize not in get_args(Tokenize):
        known = ", ".join(get_args(Tokenize))
        raise UserError(f"--tokenize: found {tokenize!r}, expected {known}")
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise UserError(
            "sacreBLEU is not installed; pip install 'megamoe[translate]', or leave out --score"
        ) from None
    try:
        # force: no warning of references that look tokenised, such as messages that end in ' .'
        bleu = BLEU(tokenize=tokenize, force=True)
    except (ImportError, RuntimeError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"--tokenize: {tokenize} is not installed: {line}") from None
    return {"BLEU": bleu, "chrF": CHRF(), "chrF++": CHRF(word_order=2)}


def corpus_scores(metrics: dict[str, Any], hypotheses: list[str], references: list[str]) -> dict[str, Score]:
    """Return the score of a corpus by each of `metrics_of`; line i is compared with reference i."""
    found = {}
    for name, metric in metrics.items():
        result = metric.corpus_score(hypotheses, [references])
        found[name] = Score(float(result.score), str(metric.get_signature()), str(result))
    return found


def one_line(text: str) -> str:
    """Return a text without line breaks of any kind: line i of a file is then sentence i for every reader."""
    return " ".join(text.splitlines())


def scored_twice(
    metrics: dict[str, Any], translations: list[str], sources: list[str], references: list[str]
) -> dict[str, dict[str, Score]]:
    """Return the scores of the translations and of the copy baseline: the sources as their own translations.

    All are compared on one line each, as they stand in files.
    """
    lines = [one_line(reference) for reference in references]
    return {
        name: corpus_scores(metrics, [one_line(text) for text in texts], lines)
        for name, texts in (("translation", translations), ("copy", sources))
    }
