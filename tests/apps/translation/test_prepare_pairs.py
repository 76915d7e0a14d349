"""tools/prepare_pairs.py: what it writes, and one line and exit code 2 for each kind of bad input."""

import errno
import fcntl
import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megamoe.apps.prepare.verify import verify_in_full
from megamoe.apps.prepare.write import lengths_of
from megamoe.apps.translation import prepare as prepare_module
from megamoe.apps.translation import prepare_command as prepare_pairs
from megamoe.apps.translation.card import load_pair_card
from megamoe.apps.translation.pairs import Counts, read_tsv
from megamoe.config.schema import DataConfig, SourceConfig
from megamoe.data.card import DataFiles, load_card
from megamoe.data.tokenizers import load_tokenizer
from megamoe.data.vocabulary import resolve_vocabulary
from megamoe.errors import UserError

WORDS = {"de": "ein", "fr": "un", "pt_BR": "um"}


def prepare(output: Path, *options: object) -> int:
    """The exit code of the tool."""
    return prepare_pairs.main([*map(str, options), "--output", str(output)])


def tables(folder: Path) -> list[object]:
    """Options for 60 messages in each language; the language's word begins every target."""
    options: list[object] = []
    for language, word in WORDS.items():
        names = [f"{module} {number}" for module in ("blog", "shop") for number in range(30)]
        lines = [f"{name.replace(' ', ' message ')} %(name)s\t{word} {name} %(name)s\n" for name in names]
        (folder / f"{language}.tsv").write_text("".join(lines))
        options += ["--tsv", language, folder / f"{language}.tsv"]
    return options


@pytest.fixture(name="prepared", scope="module")
def _prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs with a trained tokenizer."""
    folder = tmp_path_factory.mktemp("pairs")
    options = ["--vocab-size", "420", "--split", "0.6,0.2,0.2", "--min-words", "3"]
    assert prepare(folder / "out", *tables(folder), *options) == 0
    return folder / "out"


def texts_of(prefix: Path, output: Path) -> list[str]:
    tokenizer = load_tokenizer(str(output / "tokenizer.json"))
    indexed = IndexedDataset(str(prefix))
    documents = [indexed[number].tolist() for number in range(len(indexed))]
    assert all(document[-1] == tokenizer.eod and tokenizer.eod not in document[:-1] for document in documents)
    return [tokenizer.decode(document) for document in documents]


def test_several_ready_made_splits_and_further_pairs_of_their_messages(tmp_path: Path) -> None:
    """A training pair that another file tests on is left out of train, and a further pair out of the test."""
    for name, texts in {
        "a": ("one big river", "two big seas"),
        "b": ("three hills", "one big river"),
    }.items():
        for split, text in zip(("train", "test"), texts, strict=True):
            (tmp_path / f"{name}.{split}.en").write_text(f"{text}\n")
            (tmp_path / f"{name}.{split}.de").write_text(f"das {text} ist\n")
    (tmp_path / "more.tsv").write_text("Two big seas!\tzwei Meere\n")
    files = [
        part
        for name in ("a", "b")
        for part in ("--split-files", "de", *(tmp_path / f"{name}.{{split}}.{side}" for side in ("en", "de")))
    ]
    more = ["--tsv", "de", tmp_path / "more.tsv", "--tokenizer", "bytes", "--special", "pad,<2de>"]
    assert prepare(tmp_path / "out", *files, *more) == 0
    card = json.loads((tmp_path / "out/card.json").read_text())
    assert card["pairs"] == {"train": 1, "valid": 0, "test": 2}
    assert card["left_out"] == {
        "equal to another pair": 1,
        "of a message in a ready-made valid or test split": 1,
    }


def test_sides_are_aligned_and_languages_follow_each_other(prepared: Path) -> None:
    messages: dict[str, set[str]] = {}
    for split in ("train", "valid", "test"):
        card, _, _ = load_pair_card(str(prepared / "pairs" / split))
        sources = texts_of(prepared / "pairs" / f"{split}.source", prepared)
        targets = texts_of(prepared / "pairs" / f"{split}.target", prepared)
        languages = [one.language for one in card.languages for _ in range(one.pairs)]
        assert languages == sorted(languages) and {*languages} == {*WORDS}
        for source, target, language in zip(sources, targets, languages, strict=True):
            assert source.replace("message ", "") == target.removeprefix(f"{WORDS[language]} ")
        messages[split] = {*sources}
        lengths_N = lengths_of(DataFiles(prepared / "pairs" / f"{split}.target"))
        assert sum(one.target_tokens for one in card.languages) == lengths_N.sum()
    assert sum(map(len, messages.values())) == len(set.union(*messages.values())) == 60


def test_corpora_hold_each_text_once(prepared: Path) -> None:
    assert sorted(path.stem for path in (prepared / "mono").glob("*.bin")) == ["de", "en", "fr", "pt_BR"]
    pairs, _, _ = load_pair_card(str(prepared / "pairs" / "train"))
    for language in pairs.languages:
        assert sorted(texts_of(prepared / "mono" / language.language, prepared)) == sorted(
            text
            for text in texts_of(prepared / "pairs" / "train.target", prepared)
            if text.startswith(WORDS[language.language])
        )
    english = texts_of(prepared / "mono" / "en", prepared)
    assert len(english) == pairs.languages[0].pairs and english[0].startswith("blog message")
    # The other splits: all languages in one dataset, and none of their messages in training.
    valid = texts_of(prepared / "mono_valid" / "all", prepared)
    numbers = {text.split()[-2] + text.split()[0] for text in valid if text.split()[1] == "message"}
    assert len(valid) == 4 * len(numbers)
    assert not numbers & {text.split()[-2] + text.split()[0] for text in english}


def test_datasets_are_verified_like_others(prepared: Path) -> None:
    prefixes = [path.with_suffix("") for path in prepared.rglob("*.bin")]
    assert len(prefixes) == 6 + 4 + 2
    for prefix in prefixes:
        verify_in_full(str(prefix))
    sources = [SourceConfig(path=str(prefix)) for prefix in prefixes]
    vocabulary = resolve_vocabulary(DataConfig(sources=sources), None)
    assert sorted(vocabulary.special.languages) == ["de", "en", "fr", "pt_BR"]
    assert vocabulary.special.mask is not None and len(vocabulary.special.sentinels) == 100
    card = load_card(str(prefixes[0]))
    assert card is not None and card.tokenizer.reference == "../tokenizer.json"
    assert np.load(prefixes[0].with_name(f"{prefixes[0].name}.counts.npy")).sum() == card.tokens


def test_summary(prepared: Path) -> None:
    summary = json.loads((prepared / "card.json").read_text())
    assert summary["languages"] == dict.fromkeys(WORDS, 60)
    assert sum(summary["pairs"].values()) == 180
    path = prepared.parent / "de.tsv"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = {"name": str(path), "size": path.stat().st_size, "sha256": digest, "documents": 60}
    assert len(summary["sources"]) == 3 and summary["sources"][0] == expected


def test_copies_are_left_out_of_valid_and_test_pairs(tmp_path: Path) -> None:
    """And the bilingual corpora hold the training pairs of their language."""
    lines = [f"copied words {n} now\t{'copied words' if n % 2 else 'andere'} {n}\n" for n in range(100)]
    (tmp_path / "de.tsv").write_text("".join(lines))
    options = ["--max-overlap", "0.5", "--bilingual", "--split", "0.5,0.25,0.25", "--tokenizer", "bytes"]
    out = tmp_path / "out"
    assert prepare(out, "--tsv", "de", tmp_path / "de.tsv", *options) == 0
    summary = json.loads((out / "card.json").read_text())
    numbers = {}
    for split in ("train", "valid", "test"):
        indexed = IndexedDataset(str(out / "pairs" / f"{split}.target"))
        texts = [bytes(token for token in indexed[n] if token < 256).decode() for n in range(len(indexed))]
        numbers[split] = len(texts), sum(text.startswith("copied") for text in texts)
    assert numbers["train"][1] > 0 and numbers["valid"][1] == numbers["test"][1] == 0
    left_out = sum(number for reason, number in summary["left_out"].items() if "out of pairs/" in reason)
    assert left_out == 100 - sum(number for number, _ in numbers.values()) > 0
    both = IndexedDataset(str(out / "bilingual" / "de"))
    assert len(both) == numbers["train"][0]
    first = bytes(token for token in both[0] if token < 256).decode()
    source, target = first.split("\n")
    assert source.startswith("copied words") and target.split()[-1] == source.split()[-2]


def test_other_inputs_give_the_same_pairs(tmp_path: Path) -> None:
    lines = [(f"source {number}", f"target {number}") for number in range(20)]
    (tmp_path / "a.en").write_text("".join(f"{source}\n" for source, _ in lines))
    (tmp_path / "a.de").write_text("".join(f"{target}\r\n" for _, target in lines))
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress("".join(f"{s}\t{t}\n" for s, t in lines).encode()))
    inputs = {
        "aligned": (["--aligned", "de", tmp_path / "a.en", tmp_path / "a.de"], ("a.en", "a.de")),
        "tsv": (["--tsv", "de", tmp_path / "b.tsv.gz"], ("b.tsv.gz",)),
    }
    written = []
    for name, (options, files) in inputs.items():
        assert prepare(tmp_path / name, *options, "--tokenizer", "bytes") == 0
        written.append((tmp_path / name / "pairs" / "train.target.bin").read_bytes())
        summary = json.loads((tmp_path / name / "card.json").read_text())
        assert [(one["name"], one["documents"]) for one in summary["sources"]] == [
            (str(tmp_path / file), 20) for file in files
        ]
        card = load_card(str(tmp_path / name / "pairs" / "train.target"))
        assert card is not None
        assert card.tokenizer.reference == "bytes+pad,mask,sentinels,<2en>,<2de>"
    assert written[0] and written == written[:1] * len(written)


def test_sentencepiece(tmp_path: Path) -> None:
    options = ["--tokenizer", "sentencepiece", "--vocab-size", "440", "--split", "1,0,0"]
    assert prepare(tmp_path / "out", *tables(tmp_path), *options) == 0
    prefix = tmp_path / "out" / "pairs" / "train.target"
    verify_in_full(str(prefix))
    data = DataConfig(sources=[SourceConfig(path=str(prefix))])
    vocabulary = resolve_vocabulary(data, None)
    assert vocabulary.tokenizer is not None and vocabulary.tokenizer.name.endswith("tokenizer.model")
    assert sorted(vocabulary.special.languages) == ["de", "en", "fr", "pt_BR"]
    indexed = IndexedDataset(str(prefix))
    assert vocabulary.tokenizer.decode(indexed[0].tolist()) == "ein blog 0 %(name)s"
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_run_that_ends_early_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.tsv").write_text("one\ttwo\n")
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    options = ["--tsv", "de", tmp_path / "a.tsv", "--tokenizer", "bytes"]

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "save_checked", full_disk)
        assert prepare(out, *options) == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert not out.exists() and not partial.exists()
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "save_checked", lambda *_: (_ for _ in ()).throw(SystemError))
        assert prepare(out, *options) == 1
    assert not out.exists() and not partial.exists()
    (partial / "new" / "pairs").mkdir(parents=True)  # what a killed run leaves
    (partial / "lock").touch()
    with open(partial / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert prepare(out, *options) == 2
        assert "is being written by another run" in capsys.readouterr().err
    assert prepare(out, *options) == 0
    assert out.is_dir() and not partial.exists()


def test_replacing_an_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.tsv").write_text("one\ttwo\n")
    out = tmp_path / "out"
    options = ["--tsv", "de", tmp_path / "a.tsv", "--tokenizer", "bytes"]
    assert prepare(out, *options) == 0
    (out / "more").write_text("x")
    assert prepare(out, *options) == 2
    assert "exists; choose another --output or add --overwrite" in capsys.readouterr().err
    assert (out / "more").exists()
    assert prepare(out, *options, "--overwrite") == 0
    assert not (out / "more").exists() and [*tmp_path.glob(".*")] == []
    assert prepare(tmp_path / "bytes", *options) == 0  # a folder of the name of a tokenizer
    (out / "tokenizer.json").write_text("mine")
    assert prepare(out, *options[:-1], out / "tokenizer.json", "--overwrite") == 2
    assert "lies in the output folder, which is replaced" in capsys.readouterr().err
    assert (out / "tokenizer.json").read_text() == "mine"
    (out / "card.json").write_text("{}")  # a folder of something else is left as it is
    assert prepare(out, *options, "--overwrite") == 2
    assert "is not a folder of prepared pairs" in capsys.readouterr().err


def test_a_file_that_is_cut_off(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "cut.tsv.gz").write_bytes(gzip.compress(b"a\tb\n" * 9)[:-9])
    assert "cut.tsv.gz: cannot be read" in refused(
        "prepare_pairs", "--tsv", "de", "cut.tsv.gz", "--output=out"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["cut.tsv.gz"]


def test_bad_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "de.tsv").write_text("one\ttwo\nthree\n")
    counts = Counts(bad_lines="skip")
    assert len(list(read_tsv("de", str(tmp_path / "de.tsv"), counts))) == 1
    assert counts.left_out == {"bad line": 1}
    with pytest.raises(UserError, match=r"de\.tsv:2: 1 columns.*--bad-lines skip"):
        list(read_tsv("de", str(tmp_path / "de.tsv"), Counts()))
