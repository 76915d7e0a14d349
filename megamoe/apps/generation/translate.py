"""Translates sentences with an encoder-decoder by beam search; before that, the directions that a checkpoint
was trained for, and its sources and references.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.beam_search import BeamOptions, Hypothesis, beam_search
from megamoe.apps.generation.generate import agreement, check_tokens, tokenizer_of, without_text
from megamoe.apps.generation.runner import Runner, check_cache
from megamoe.apps.translation.card import load_pair_card
from megamoe.apps.translation.dataset import Direction, PairDataset, PairOptions, Tag, directions
from megamoe.apps.translation.pairs import normalize_language
from megamoe.data.card import is_pairs
from megamoe.data.stored import beside
from megamoe.errors import UserError
from megamoe.registry import get_part

EXTRA = 50  # tokens of a translation beyond those of its source at most (Vaswani et al. 2017, section 6.1)


@dataclass(frozen=True)
class TranslationDirection:
    """A direction of translation. tag: where the target language's tag stands.

    source_prefix, target_prefix: the tokens with which every source begins, and every target after the
    decoder's first one.
    """

    source: str
    target: str
    tag: Tag = "none"
    source_prefix: tuple[int, ...] = ()
    target_prefix: tuple[int, ...] = ()


def direction_of(trained: TrainedModel, source: str, target: str) -> TranslationDirection:
    """Return a direction that the model was trained for.

    Raises:
        UserError: for another one, a model that was not trained to translate, or a missing tag.
    """
    options = _options(trained)
    card = load_pair_card(trained.config.data.sources[0].path)[0]
    learned = directions(card, options.languages, options.direction)
    known = [(left, right) for each, left, right in learned if options.languages or each.pairs]
    wanted = normalize_language(source) or source, normalize_language(target) or target
    if wanted not in known:
        near = [pair for pair in known if pair[0] == wanted[0] or pair[1] == wanted[1]] or known
        shown = ", ".join("-".join(pair) for pair in near[:8]) + (" and others" if len(near) > 8 else "")
        raise UserError(
            f"--from {source} --to {target}: {trained.path} was not trained for it; it translates {shown}"
        )
    if options.tag == "none":
        return TranslationDirection(*wanted)
    if (tag := trained.vocabulary.special.languages.get(wanted[1])) is None:
        raise UserError(
            f"--to {target}: the tokenizer reserves no <2{wanted[1]}>, but the model was trained with tags"
        )
    prefixes: dict[str, tuple[int, ...]] = {"source": (), "target": (), options.tag: (tag,)}
    return TranslationDirection(*wanted, options.tag, prefixes["source"], prefixes["target"])


def _options(trained: TrainedModel) -> Any:
    """Return the options of the objective, if it learned to translate."""
    choice = trained.config.train.objective
    part: Any = get_part("objective", choice.name)
    if part.reads != "pairs" or not all(hasattr(choice.options, key) for key in ("direction", "tag")):
        raise UserError(
            f"{trained.path}: trained with train.objective {choice.name}; expected one that learns to "
            "translate"
        )
    return choice.options


@dataclass(frozen=True)
class Sentences:
    """What is translated.

    texts: the sources. tokens: theirs with tag and end token; empty for a blank line, which stays blank.
    references: the translations to compare with, if there are any. cut: the number of sources that were cut.
    """

    texts: list[str]
    tokens: list[list[int]]
    references: list[str] | None
    cut: int


def of_lines(
    trained: TrainedModel, direction: TranslationDirection, lines: list[str], too_long: str
) -> Sentences:
    """Return the sentences of a text with one on each line.

    Raises:
        UserError: if all lines are blank, or if one is too long.
    """
    if not any(line.strip() for line in lines):
        raise UserError("--input: has no text; expected a sentence on each line")
    tokenizer, end = tokenizer_of(trained), _end(trained)
    found = tokenizer.encode_batch(lines)
    check_tokens(trained, "--input:", [token for tokens in found for token in tokens])
    tokens = [
        [*direction.source_prefix, *tokens, end] if line.strip() else []
        for line, tokens in zip(lines, found, strict=True)
    ]
    return _bounded(trained, lines, tokens, None, too_long, "line")


def of_pairs(
    trained: TrainedModel,
    direction: TranslationDirection,
    pairs: str | None,
    split: str,
    most: int | None,
    too_long: str,
) -> Sentences:
    """Return the sentences of prepared pairs, with their references.

    pairs: the folder of the splits, or a split's prefix; None: the folder that the model was trained on.
    most: the number of pairs; None: all.

    Raises:
        UserError: if there are none of this direction, or if they have another tokenizer.
    """
    prefix = _prefix(trained, pairs, split)
    card, of_source, _ = load_pair_card(prefix)
    tokenizer = tokenizer_of(trained)
    if of_source.tokenizer.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"--pairs: {prefix} has another tokenizer than the model; prepare them with "
            f"--tokenizer {tokenizer.name}, or give the text itself with --input"
        )
    way: Direction = "from" if direction.source == card.source_language else "into"
    other = direction.target if way == "from" else direction.source
    there = [each.language for each in card.languages if each.pairs]
    if other not in there:
        raise UserError(f"--pairs: {prefix} has no pairs of {direction.source}-{direction.target}")
    options = PairOptions((other,), way, direction.tag)
    dataset = PairDataset(prefix, trained.vocabulary.of_data, options)
    items = [dataset[number] for number in range(min(len(dataset), most or len(dataset)))]
    sources = [item["source"].tolist() for item in items]
    texts = [tokenizer.decode(source) for source in sources]
    references = [tokenizer.decode(item["target"].tolist()) for item in items]
    return _bounded(trained, texts, sources, references, too_long, "pair")


def _prefix(trained: TrainedModel, pairs: str | None, split: str) -> str:
    if pairs is None:
        return beside(trained.config.data.sources[0].path, split, trained.config.data)
    return pairs if is_pairs(pairs) else str(Path(pairs) / split)


def _end(trained: TrainedModel) -> int:
    assert trained.vocabulary.eod is not None, "checked when the model was trained"
    return trained.vocabulary.eod


def _bounded(
    trained: TrainedModel,
    texts: list[str],
    tokens: list[list[int]],
    references: list[str] | None,
    too_long: str,
    what: str,
) -> Sentences:
    """Cut or refuse sources of more tokens than the model was trained on."""
    most = trained.config.data.sequence_length
    long = [number for number, each in enumerate(tokens, start=1) if len(each) > most]
    if long and too_long == "error":
        raise UserError(
            f"{what} {long[0]}: its source has {len(tokens[long[0] - 1])} tokens with tag and end, more than "
            f"data.sequence_length {most} ({len(long)} such); shorten it, or cut with --too-long truncate"
        )
    end = _end(trained)
    tokens = [each if len(each) <= most else [*each[: most - 1], end] for each in tokens]
    return Sentences(texts, tokens, references, len(long))


def translate(
    trained: TrainedModel,
    direction: TranslationDirection,
    sentences: Sentences,
    search: BeamOptions,
    *,
    max_length: int | None = None,
    batch_size: int = 32,
) -> list[list[Hypothesis]]:
    """Return the hypotheses of each sentence, the best first; none of a blank one. Collective over all ranks.

    A translation has at most as many tokens as its source and EXTRA more, both with their ends, at most
    `max_length`, and at most data.sequence_length. Sources of similar lengths form a batch.

    Raises:
        UserError: as `runner.check_cache`.
    """
    check_cache(trained)
    end = _end(trained)
    prefix = [end, *direction.target_prefix]
    # What is no text: all reserved tokens, and ids that no data has.
    forbidden = sorted({*trained.vocabulary.special.ids.values(), *without_text(trained)} - {end})
    most = trained.config.data.sequence_length - len(direction.target_prefix)
    most = max(1, min(most, max_length or most))
    found: list[list[Hypothesis]] = [[] for _ in sentences.tokens]
    numbers = [number for number, tokens in enumerate(sentences.tokens) if tokens]
    numbers.sort(key=lambda number: -len(sentences.tokens[number]))
    for first in range(0, len(numbers), batch_size):
        batch = numbers[first : first + batch_size]
        sources = [sentences.tokens[number] for number in batch]
        limits = [min(most, len(source) + EXTRA) for source in sources]
        runner = Runner(trained, [prefix] * len(batch), max(limits), sources=sources)
        hypotheses = beam_search(
            runner, limits, search, end=end, forbidden=forbidden, agree=agreement(trained)
        )
        for number, of_source in zip(batch, hypotheses, strict=True):
            found[number] = of_source
    return found
