"""BLEU and chrF of translations by sacreBLEU, with the signatures that make scores comparable (Post 2018)."""

from typing import Any

from megamoe.apps.translation.pairs import normalize_language
from megamoe.errors import UserError

WITHOUT_SPACES = ("ja", "km", "lo", "my", "th")  # languages that 13a takes for one word a sentence


def default_tokenize(language: str) -> str:
    """Return BLEU's tokenisation for a target language: zh for Chinese, char where words have no spaces.

    language: in any spelling that `normalize_language` takes, such as zh_CN or zh-cn.
    """
    first = (normalize_language(language) or language).split("_")[0]
    return "zh" if first == "zh" else "char" if first in WITHOUT_SPACES else "13a"


def metrics_of(language: str) -> dict[str, Any]:
    """Return sacreBLEU's metrics for a target language by name: BLEU, chrF (chrF2) and chrF++ (chrF2++).

    Raises:
        UserError: if sacreBLEU is not installed.
    """
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError:
        raise UserError(
            "sacreBLEU is not installed; pip install 'megamoe[translate]', or leave out --score"
        ) from None
    # force: no warning of references that look tokenised, such as messages that end in ' .'
    bleu = BLEU(tokenize=default_tokenize(language), force=True)
    return {"BLEU": bleu, "chrF": CHRF(), "chrF++": CHRF(word_order=2)}


def one_line(text: str) -> str:
    """Return a text without line breaks of any kind: line i of a file is then sentence i for every reader."""
    return " ".join(text.splitlines())


def scored_twice(
    metrics: dict[str, Any], translations: list[str], sources: list[str], references: list[str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the scores of the translations and of the copy baseline: the sources as their own translations.

    All are compared on one line each, as they stand in files. A score has `score`, from 0 to 100, `signature`
    and `details`, sacreBLEU's line, such as the precisions of BLEU.
    """
    expected = [one_line(text) for text in references]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, texts in (("translation", translations), ("copy", sources)):
        found[name] = {}
        for key, metric in metrics.items():
            result = metric.corpus_score([one_line(text) for text in texts], [expected])
            about = {"signature": str(metric.get_signature()), "details": str(result)}
            found[name][key] = {"score": float(result.score), **about}
    return found
