"""Preparing pairs: one folder with pairs, a corpus for each language, and a tokenizer.

Design choices:
- the folder is written beside its place and renamed when it is complete, so a killed run leaves nothing that
  looks finished;
- what is written depends on the pairs, their order and the options alone;
- pairs are held in memory, as messages of all languages must be compared to split them.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megamoe import __version__
from megamoe.apps.prepare.new_tokenizers import load_with_special, train_bpe, train_sentencepiece
from megamoe.apps.prepare.write import (
    TextCounts,
    lengths_of,
    locked_folder,
    reference_of,
    write_card,
    write_tokens,
)
from megamoe.apps.translation.card import LanguageCard, PairCard
from megamoe.apps.translation.pairs import (
    SPLITS,
    Counts,
    Pair,
    check_language,
    read_aligned,
    read_splits,
    read_tsv,
)
from megamoe.apps.translation.select import (
    count_languages,
    in_split,
    keep_pairs,
    outside_of_ready_splits,
    overlap,
    split_pairs,
)
from megamoe.data.card import DataCard, DataFiles, PairFiles, SourceCard, load_checked, save_checked
from megamoe.data.special import expand, language_tag
from megamoe.data.tokenizers import ByteTokenizer, Tokenizer, is_bytes, load_tokenizer
from megamoe.errors import UserError
from megamoe.io import real

TRAIN, SENTENCEPIECE = "train", "sentencepiece"
TRAINED = {TRAIN: "tokenizer.json", SENTENCEPIECE: "tokenizer.model"}  # the file of each kind
CARD_FILE = "card.json"
BATCH_TEXTS = 4096
LARGEST_VOCABULARY = 10**8


@dataclass(frozen=True)
class PairPreparation:
    """The options of tools/prepare_pairs.py."""

    output: str  # folder
    aligned: list[list[str]] = field(default_factory=list)  # of [language, source file, target file]
    split_files: list[list[str]] = field(default_factory=list)  # the same, with {split} in both names
    tsv: list[list[str]] = field(default_factory=list)  # of [language, file]
    bad_lines: str = "error"  # or skip: lines of tsv that are no pair
    source_language: str = "en"
    languages: list[str] = field(default_factory=list)  # empty: all
    min_words: int = 1
    min_pairs: int = 1
    max_overlap: float = 1.0  # in pairs/valid and pairs/test: share of a source's words in its target
    bilingual: bool = False  # also corpora of pairs
    split: list[float] = field(default_factory=lambda: [0.9, 0.05, 0.05])
    tokenizer: str = TRAIN
    vocab_size: int = 8192  # of a tokenizer that is trained
    special: str = "pad,mask,sentinels"
    overwrite: bool = False


@dataclass(frozen=True)
class PairsSummary:
    """What was prepared: `card.json` of the output."""

    megamoe: str
    source_language: str
    pairs: dict[str, int]  # by split
    languages: dict[str, int]  # pairs by language
    left_out: dict[str, int]  # pairs by reason
    vocab_size: int
    tokens: dict[str, int]  # of the training corpus by language
    options: dict[str, object]
    warnings: list[str]
    sources: list[SourceCard]  # the files that were read

    def text(self, output: str) -> str:
        """Return the lines that say what was written to `output`."""
        most = sorted(self.languages.items(), key=lambda item: -item[1])[:8]
        left_out = [f"{number:,} {reason}" for reason, number in self.left_out.items()]
        return "\n".join(
            [
                f"{output}: {sum(self.pairs.values()):,} pairs from {self.source_language} into "
                f"{len(self.languages)} languages ("
                + ", ".join(f"{split} {number:,}" for split, number in self.pairs.items())
                + ")",
                f"most pairs: {', '.join(f'{language} {number:,}' for language, number in most)}",
                f"corpora: {len(self.tokens)} languages, {sum(self.tokens.values()):,} tokens, vocabulary "
                f"{self.vocab_size:,}",
                f"left out: {'; '.join(left_out) or 'nothing'}",
            ]
        )


Further = Callable[[Counts], Iterator[Pair]]
Finish = Callable[[Sequence[Pair], Sequence[str], Path], None]


def prepare_pairs(
    preparation: PairPreparation, further: Further | None = None, finish: Finish | None = None
) -> PairsSummary:
    """Read, split, tokenize and write pairs; return what was done.

    further: yields pairs beside those of the files. finish: gets the pairs, the split of each and the new
    folder, to which it may add files before the folder is published.

    Raises:
        UserError: for input that is missing, broken or empty, an output that exists or cannot be written,
            or a tokenizer that does not fit. Nothing is left then.
    """
    output = Path(preparation.output)
    _check(preparation, output)
    counts = Counts(bad_lines=preparation.bad_lines)
    source_language = check_language(preparation.source_language)
    pairs = keep_pairs(
        _read(preparation, counts, further),
        counts,
        source_language=source_language,
        languages=preparation.languages,
        min_words=preparation.min_words,
        min_pairs=preparation.min_pairs,
    )
    pairs = outside_of_ready_splits(pairs, counts)
    splits = split_pairs(pairs, preparation.split)
    if "train" not in splits:
        raise UserError(
            f"split: all {len(pairs)} pairs fell into valid and test; add pairs or raise the share of train"
        )
    partial = output.with_name(f".{output.name}.partial")
    with locked_folder(partial, preparation.output):
        writer = _Writer(preparation, source_language, pairs, splits, partial / "new", output)
        summary = writer.write(counts)
        if finish is not None:
            finish(pairs, splits, partial / "new")
        _publish(partial, output)
    return summary


def _check(preparation: PairPreparation, output: Path) -> None:
    for name in ("min_words", "min_pairs"):
        if getattr(preparation, name) < 1:
            raise UserError(f"{name} {getattr(preparation, name)}: expected at least 1")
    if not 0 <= preparation.max_overlap <= 1:
        raise UserError(f"max_overlap {preparation.max_overlap}: expected a share from 0 to 1, such as 0.3")
    if preparation.vocab_size > LARGEST_VOCABULARY:
        raise UserError(f"vocab_size {preparation.vocab_size}: expected at most {LARGEST_VOCABULARY:,}")
    if not output.name:
        raise UserError(f"output {preparation.output!r}: expected a new folder such as data/catalogues")
    if output.exists() and not preparation.overwrite:
        raise UserError(f"output {preparation.output!r} exists; choose another --output or add --overwrite")
    if output.exists():
        try:
            load_checked(output / CARD_FILE, PairsSummary)
        except UserError as error:
            raise UserError(
                f"output {preparation.output!r} is not a folder of prepared pairs, so --overwrite leaves it "
                "as it is; choose another --output"
            ) from error
    is_file = preparation.tokenizer not in (*TRAINED, ByteTokenizer.name)
    if is_file and real(Path(preparation.tokenizer)).is_relative_to(real(output)):
        raise UserError(
            f"tokenizer {preparation.tokenizer!r} lies in the output folder, which is replaced; copy it to "
            "another place and name that"
        )
    expand(preparation.special)


def _read(preparation: PairPreparation, counts: Counts, further: Further | None) -> Iterator[Pair]:
    if not any((preparation.aligned, preparation.split_files, preparation.tsv, further)):
        raise UserError("no pairs: name them with --aligned, --split-files or --tsv")
    yield from read_splits(preparation.split_files, counts)
    for language, source, target in preparation.aligned:
        yield from read_aligned(language, source, target, counts)
    for language, path in preparation.tsv:
        yield from read_tsv(language, path, counts)
    if further is not None:
        yield from further(counts)


@dataclass
class _Writer:
    """Writes everything into a new folder.

    folder: the new folder. final: the place that it will be moved to.
    """

    preparation: PairPreparation
    source_language: str
    pairs: Sequence[Pair]
    splits: Sequence[str]
    folder: Path
    final: Path

    def write(self, counts: Counts) -> PairsSummary:
        (self.folder / "pairs").mkdir(parents=True)
        (self.folder / "mono").mkdir()
        self._tokenizer = self._find_tokenizer(counts)
        file = TRAINED.get(self.preparation.tokenizer, TRAINED[TRAIN])
        made, published = self.folder / file, self.final / file
        reference = reference_of(self._tokenizer, self.final, made, published)
        is_outside = is_bytes(reference) or Path(reference).is_absolute()
        self._reference = reference if is_outside else f"../{reference}"
        for split in SPLITS:
            self._write_pairs(split, counts)
        tokens = self._write_corpora()
        summary = PairsSummary(
            megamoe=__version__,
            source_language=self.source_language,
            pairs={split: self.splits.count(split) for split in SPLITS},
            languages=count_languages(self.pairs),
            left_out=dict(counts.left_out.most_common()),
            vocab_size=self._tokenizer.vocab_size,
            tokens=tokens,
            options=asdict(self.preparation),
            warnings=counts.warnings,
            sources=counts.sources,
        )
        save_checked(asdict(summary), self.folder / CARD_FILE)
        return summary

    def _find_tokenizer(self, counts: Counts) -> Tokenizer:
        """Return the tokenizer: trained on the training texts of all languages, or the one that is named."""
        preparation = self.preparation
        languages = [self.source_language, *count_languages(self.pairs)]
        tags = [language_tag(language) for language in languages]
        if preparation.tokenizer in TRAINED:
            path = self.folder / TRAINED[preparation.tokenizer]
            texts = (text for texts in self._corpora("train").values() for text in texts)
            train = train_bpe if preparation.tokenizer == TRAIN else train_sentencepiece
            train(texts, preparation.vocab_size, path, [*expand(preparation.special), *tags])
            return load_tokenizer(str(path))
        if preparation.tokenizer == ByteTokenizer.name:
            return load_with_special(preparation.tokenizer, ",".join([preparation.special, *tags]))
        tokenizer = load_tokenizer(preparation.tokenizer)
        missing = [tag for tag in tags if tag not in tokenizer.special.ids]
        if missing:
            counts.warnings.append(
                f"tokenizer {tokenizer.name!r} reserves no {missing[0]} and lacks {len(missing)} tags of "
                "languages in all: translation into several languages needs them"
            )
        return tokenizer

    def _write_pairs(self, split: str, counts: Counts) -> None:
        """Write both sides of a split, and their card; nothing if the split is empty."""
        pairs, most = list(in_split(self.pairs, self.splits, split)), self.preparation.max_overlap
        if split != SPLITS[0]:
            few = [pair for pair in pairs if overlap(pair) <= most]
            if len(few) < len(pairs):
                reason = f"out of pairs/{split}, whose target has more than {most:g} of the source's words"
                counts.left_out[reason] += len(pairs) - len(few)
            pairs = few
        if not pairs:
            return
        files = PairFiles(self.folder / "pairs" / split)
        sides = [
            self._write_dataset(files.source, [pair.source for pair in pairs]),
            self._write_dataset(files.target, [pair.target for pair in pairs]),
        ]
        lengths = [lengths_of(files.source), lengths_of(files.target)]
        languages, start = [], 0
        for language, number in count_languages(pairs).items():
            tokens = [int(side[start : start + number].sum()) for side in lengths]
            languages.append(LanguageCard(language, number, *tokens))
            start += number
        card = PairCard(
            megamoe=__version__,
            source_language=self.source_language,
            languages=languages,
            source_idx_sha256=sides[0].idx.sha256,
            target_idx_sha256=sides[1].idx.sha256,
        )
        save_checked(asdict(card), files.card)

    def _write_corpora(self) -> dict[str, int]:
        """Write the training texts of each language, and those of all languages for validation and test.

        Returns:
            The tokens of the training texts by language.
        """
        folder, tokens = self.folder / "mono", {}
        for language, texts in self._corpora("train").items():
            tokens[language] = self._write_dataset(DataFiles(folder / language), texts).tokens
        if self.preparation.bilingual:
            pairs_of: dict[str, list[str]] = {}
            for pair in in_split(self.pairs, self.splits, "train"):
                pairs_of.setdefault(pair.language, []).append(f"{pair.source}\n{pair.target}")
            for language, texts in pairs_of.items():
                self._write_dataset(DataFiles(self.folder / "bilingual" / language), texts)
        for split in SPLITS[1:]:
            texts = [text for texts in self._corpora(split).values() for text in texts]
            if texts:
                self._write_dataset(DataFiles(self.folder / f"mono_{split}" / "all"), texts)
        return tokens

    def _corpora(self, split: str) -> dict[str, list[str]]:
        """Return the texts of a split by language, each once."""
        texts: dict[str, dict[str, None]] = {self.source_language: {}}
        for pair in in_split(self.pairs, self.splits, split):
            texts[self.source_language][pair.source] = None
            texts.setdefault(pair.language, {})[pair.target] = None
        return {language: list(found) for language, found in texts.items()}

    def _write_dataset(self, files: DataFiles, texts: list[str]) -> DataCard:
        files.prefix.parent.mkdir(exist_ok=True)
        batches = (texts[start : start + BATCH_TEXTS] for start in range(0, len(texts), BATCH_TEXTS))
        counts_V = write_tokens(batches, self._tokenizer, files)
        counts = TextCounts(len(texts), 0, sum(len(text.encode("utf-8")) for text in texts))
        return write_card(counts, self._tokenizer, self._reference, files, counts_V)


def _publish(partial: Path, output: Path) -> None:
    """Move the new folder to its place; an old one goes to the folder that is deleted at the end."""
    for path in (partial / "new").rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    if output.exists():
        os.replace(output, partial / "old")
    os.replace(partial / "new", output)
