"""Text to .bin/.idx: every kind of input, the card's content, and no unfinished output that looks
complete.
"""

import contextlib
import fcntl
import gzip
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megamoe.apps.prepare import command as prepare_data
from megamoe.apps.prepare import prepare as prepare_module
from megamoe.apps.prepare import write as write_module
from megamoe.apps.prepare.prepare import Preparation, prepare
from megamoe.data.card import check_files, load_card
from megamoe.data.tokenizers import load_tokenizer
from megamoe.errors import UserError
from tests.support.data.sources import documents_of, prepared

ROOT = Path(__file__).resolve().parents[3]
EOD = 256
TEXT = "to be or not to be " * 50


def json_lines(*texts: str, key: str = "text") -> bytes:
    return b"".join(json.dumps({key: text}).encode() + b"\n" for text in texts)


def test_folder_is_read_in_sorted_order_one_document_a_file(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name, text in {"b.txt": "bé\r\n", "sub/a.txt": "deep", "a.txt": "first", ".hidden": "no"}.items():
        (tmp_path / "in" / name).write_bytes(text.encode())
    prepared(tmp_path / "out", tmp_path / "in")
    assert documents_of(tmp_path / "out") == ["first", "bé\r\n", "deep"]


def test_files_keep_the_order_given_and_globs_are_sorted(tmp_path: Path) -> None:
    for name in ("z.txt", "b.md", "a.md"):
        (tmp_path / name).write_text(name)
    prepared(tmp_path / "out", tmp_path / "z.txt", tmp_path / "*.md")
    assert documents_of(tmp_path / "out") == ["z.txt", "a.md", "b.md"]


@pytest.mark.parametrize(
    ("ending", "compress"),
    [
        (".jsonl", lambda data: data),
        (".jsonl.gz", gzip.compress),
        # Two frames in one file, as `zstd a b > c` or a parallel compressor makes.
        (".jsonl.zst", lambda data: zstandard.compress(data[:10]) + zstandard.compress(data[10:])),
    ],
)
def test_json_lines(tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]) -> None:
    path = tmp_path / f"in{ending}"
    path.write_bytes(compress(json_lines("one", "", "two\nlines", "  ") + b"\n" + json_lines("three")))
    card = prepared(tmp_path / "out", path)
    assert documents_of(tmp_path / "out") == ["one", "two\nlines", "three"]
    assert (card.documents, card.empty_documents) == (3, 2)
    assert card.sources[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_key_and_compressed_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines("here", key="body"))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"zipped", mtime=0))
    prepared(tmp_path / "out", tmp_path / "a.jsonl", tmp_path / "b.txt.gz", key="body")
    assert documents_of(tmp_path / "out") == ["here", "zipped"]


def test_standard_library_without_tests_and_installed_packages(tmp_path: Path) -> None:
    card = prepared(tmp_path / "out", stdlib=True, max_documents=40)
    names = [source.name for source in card.sources]
    assert names == sorted(names) and names[0] == "stdlib:__future__.py"
    everything = [source.name for source in prepare_module.find_sources([], stdlib=True)]
    assert "stdlib:json/decoder.py" in everything and len(everything) > 400
    assert not [name for name in everything if "site-packages" in name or "/test" in name.replace(":", "/")]
    assert documents_of(tmp_path / "out")[0] == Path(sys.modules["__future__"].__file__ or "").read_text()


def test_card(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("né")
    (tmp_path / "b.jsonl").write_bytes(json_lines("xyz", "", "w"))
    returned = prepared(tmp_path / "out", tmp_path / "a.txt", tmp_path / "b.jsonl")
    card = load_card(str(tmp_path / "out"))
    assert card == returned and card is not None
    # né is 3 bytes, xyz 3, w 1; each document has one token more.
    assert (card.documents, card.empty_documents, card.tokens, card.text_bytes) == (3, 1, 10, 7)
    assert (card.dtype, card.bin.size, card.tokenizer.reference) == ("uint16", 20, "bytes")
    assert (card.tokenizer.vocab_size, card.tokenizer.eod) == (257, 256)
    assert card.tokenizer.fingerprint == load_tokenizer("bytes").fingerprint
    hashes = [hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("a.txt", "b.jsonl")]
    assert [(source.sha256, source.documents) for source in card.sources] == [(hashes[0], 1), (hashes[1], 2)]
    assert card.sources_sha256 == hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    for found, ending in ((card.bin, ".bin"), (card.idx, ".idx")):
        content = (tmp_path / f"out{ending}").read_bytes()
        assert (found.size, found.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_counts_of_every_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "BATCH_DOCUMENTS", 1)  # the batches' counts add up
    (tmp_path / "in.jsonl").write_bytes(json_lines("abca", "cab", "z"))
    card = prepared(tmp_path / "out", tmp_path / "in.jsonl")
    counts_V = np.load(tmp_path / "out.counts.npy", allow_pickle=False)
    assert (counts_V.dtype, counts_V.shape) == (np.int64, (card.tokenizer.vocab_size,))
    found = {token: count for token, count in enumerate(counts_V.tolist()) if count}
    assert found == {ord("a"): 3, ord("b"): 2, ord("c"): 2, ord("z"): 1, EOD: 3}
    assert counts_V.sum() == card.tokens


def test_trained_tokenizer_lies_beside_the_data_and_moves_with_it(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(TEXT)
    (tmp_path / "data").mkdir()
    card = prepared(tmp_path / "data" / "out", tmp_path / "in.txt", tokenizer="train", vocab_size=262)
    assert (card.tokenizer.reference, card.tokenizer.vocab_size) == ("out.tokenizer.json", 262)
    tokenizer = load_tokenizer(str(tmp_path / "data" / "out.tokenizer.json"))
    assert tokenizer.fingerprint == card.tokenizer.fingerprint
    # Megatron-Core unmaps the file with the dataset, under the feet of the arrays it gave out.
    indexed = IndexedDataset(str(tmp_path / "data" / "out"))
    tokens = indexed[0].tolist()
    assert tokens[-1] == tokenizer.eod and tokenizer.decode(tokens) == TEXT


def test_output_does_not_depend_on_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "BATCH_DOCUMENTS", 3)
    (tmp_path / "in.jsonl").write_bytes(json_lines(*(f"document {number} " * number for number in range(40))))
    for workers in (1, 2):
        prepared(tmp_path / f"w{workers}", tmp_path / "in.jsonl", workers=workers)
    for ending in (".bin", ".idx", ".counts.npy", ".card.json"):
        assert (tmp_path / f"w1{ending}").read_bytes() == (tmp_path / f"w2{ending}").read_bytes()
    assert len(documents_of(tmp_path / "w2")) == 39


def test_max_documents(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(json_lines("a", "b", "c"))
    (tmp_path / "never.txt").write_text("d")
    card = prepared(tmp_path / "out", tmp_path / "in.jsonl", tmp_path / "never.txt", max_documents=2)
    assert documents_of(tmp_path / "out") == ["a", "b"] and card.num_sources == 1
    assert card.sources[0].sha256 == hashlib.sha256((tmp_path / "in.jsonl").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"one\ntwo\nth\xffree", r"a\.txt:3: not UTF-8"),
        ("a.jsonl", json_lines("x") + b'{"text": "y"', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", json_lines("x") * 2 + b'{"body": "y"}\n', r"a\.jsonl:3: .*'text'.*body.*--key"),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl:1: .*list"),
        ("a.jsonl", b'{"text": 5}\n', r"a\.jsonl:1: "),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: .*surrogate"),
        ("a.jsonl.gz", gzip.compress(json_lines("x" * 999), mtime=0)[:-9], r"a\.jsonl\.gz: cannot be read"),
        ("a.jsonl.zst", zstandard.compress(json_lines("x" * 999))[:-5], r"a\.jsonl\.zst: cannot be read"),
        ("a.jsonl.zst", b"not zstd at all", r"a\.jsonl\.zst: cannot be read"),
        ("a.jsonl", json_lines("", " \n"), "no text in 1 files.*2 empty"),
        ("a.txt", b"", "no text in 1 files"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    for tokenizer in ("bytes", "train"):
        with pytest.raises(UserError, match=message) as caught:
            prepared(tmp_path / "out", tmp_path / name, tokenizer=tokenizer)
        assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == [name]


def test_missing_input_output_and_options(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "empty").mkdir()
    for inputs, message in (
        ([], "no input"),
        (["nowhere.txt"], "'nowhere.txt' does not exist"),
        ([tmp_path / "*.none"], "holds no files"),
        ([tmp_path / "empty"], "holds no files"),
        ([tmp_path / "a.txt", tmp_path / "*.txt"], "given twice"),
    ):
        with pytest.raises(UserError, match=message):
            prepared(tmp_path / "out", *inputs)
    for options, message in (({"workers": 0}, "workers 0"), ({"max_documents": 0}, "max_documents 0")):
        with pytest.raises(UserError, match=message):
            prepared(tmp_path / "out", tmp_path / "a.txt", **options)
    with pytest.raises(UserError, match="is a folder"):
        prepare(Preparation("x/", ["a"]))


def test_existing_output_is_refused_unless_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    prepared(tmp_path / "out", tmp_path / "a.txt", tokenizer="train", vocab_size=257)
    (tmp_path / "a.txt").write_text("new")
    with pytest.raises(UserError, match=r"exists.*--overwrite"):
        prepared(tmp_path / "out", tmp_path / "a.txt")
    prepared(tmp_path / "out", tmp_path / "a.txt", overwrite=True)
    assert documents_of(tmp_path / "out") == ["new"]
    # The tokenizer that was trained for the old data would contradict the new.
    assert sorted(os.listdir(tmp_path)) == ["a.txt", "out.bin", "out.card.json", "out.counts.npy", "out.idx"]


def test_a_tokenizer_that_lies_beside_the_output_stays(tmp_path: Path) -> None:
    """More data for a vocabulary that was trained before."""
    (tmp_path / "a.txt").write_text("old")
    prepared(tmp_path / "out", tmp_path / "a.txt", tokenizer="train", vocab_size=257)
    tokenizer = tmp_path / "out.tokenizer.json"
    content = tokenizer.read_bytes()
    for path in tmp_path.glob("out.[bic]*"):
        path.unlink()
    for text, overwrite in (("new", False), ("newer", True)):
        (tmp_path / "a.txt").write_text(text)
        prepared(tmp_path / "out", tmp_path / "a.txt", tokenizer=str(tokenizer), overwrite=overwrite)
        assert tokenizer.read_bytes() == content
        card = load_card(str(tmp_path / "out"))
        assert card is not None and card.tokenizer.reference == tokenizer.name


def test_failure_while_overwriting_keeps_the_old(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    prepared(tmp_path / "out", tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(UserError):
        prepared(tmp_path / "out", tmp_path / "a.txt", overwrite=True)
    assert documents_of(tmp_path / "out") == ["old"] and load_card(str(tmp_path / "out")) is not None


def test_two_runs_on_one_output(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / ".out.partial").mkdir()
    with open(tmp_path / ".out.partial" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="being written by another run"):
            prepared(tmp_path / "out", tmp_path / "a.txt")
    prepared(tmp_path / "out", tmp_path / "a.txt")
    assert documents_of(tmp_path / "out") == ["a"]


def die_at(point: str, output: Path, source: Path) -> None:
    """Prepare, and be killed before token batch 2 is written, or at the n-th rename."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    encode, rename, count = write_module.in_workers, os.replace, iter(range(9))

    def encode_two(*arguments: Any) -> Iterator[Any]:
        for number, batch in enumerate(encode(*arguments)):
            if number == 2:
                die()
            yield batch

    def rename_some(*arguments: Any) -> None:
        if next(count) == int(point):
            die()
        rename(*arguments)

    monkeypatch = pytest.MonkeyPatch()  # of this process, which ends here
    monkeypatch.setattr(prepare_module, "BATCH_DOCUMENTS", 1)
    if point == "tokens":
        monkeypatch.setattr(write_module, "in_workers", encode_two)
    else:
        monkeypatch.setattr(os, "replace", rename_some)
    prepared(output, source)


def in_a_process(target: Callable[..., Any], *arguments: object) -> int | None:
    """Exit code of a fork of this process, which has Megatron-Core imported already."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    process.join(30)
    return process.exitcode


@pytest.mark.parametrize("point", ["tokens", "0", "2", "3"])
def test_killed_run_leaves_nothing_that_looks_finished(tmp_path: Path, point: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(json_lines("a", "b", "c", "d"))
    assert in_a_process(die_at, point, tmp_path / "out", source) == -signal.SIGKILL
    assert not (tmp_path / "out.card.json").exists()
    assert (tmp_path / "out.counts.npy").exists() == (point == "3")  # all but the card is in place
    if point in ("tokens", "0"):
        assert not list(tmp_path.glob("out*"))
    with pytest.raises(UserError, match="unfinished"):
        load_card(str(tmp_path / "out"))
    prepared(tmp_path / "out", source, overwrite=True)
    finished = ["out.bin", "out.card.json", "out.counts.npy", "out.idx"]
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", *finished]
    check_files(str(tmp_path / "out"), load_card(str(tmp_path / "out")))


def test_tool_writes_data_and_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_bytes(json_lines("abc", ""))
    options = ["--tokenizer", "bytes", "--output", str(tmp_path / "new" / "out")]
    assert prepare_data.main([str(tmp_path / "in.jsonl"), *options]) == 0
    out = capsys.readouterr().out
    assert "1 documents, 4 tokens" in out and "1 empty" in out
    assert documents_of(tmp_path / "new" / "out") == ["abc"]


def test_tool_verifies_what_was_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.txt").write_text("abc")
    prefix = str(tmp_path / "out")
    prepared(tmp_path / "out", tmp_path / "in.txt")
    main = prepare_data.main
    assert main(["--verify", prefix]) == 0
    assert capsys.readouterr().out == f"{prefix}: sizes, SHA-256, index and token ids (up to 256) are right\n"
    (tmp_path / "out.bin").write_bytes(bytes((tmp_path / "out.bin").stat().st_size))
    assert main(["--verify", prefix]) == 2
    assert capsys.readouterr().err.startswith(f"error: data file '{prefix}.bin' is damaged")
    for wrong in (["--verify", prefix, "--output", prefix], ["--output", prefix], []):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)
        assert "--verify" in capsys.readouterr().err


def test_tool_on_a_full_disk_is_an_error_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x" * 100_000)
    (tmp_path / "to").mkdir()

    def fill_the_disk() -> None:
        sys.dont_write_bytecode = True  # Python 3.11 would leave a module's cache cut short for good
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        arguments = [str(tmp_path / "in.txt"), "--tokenizer=bytes", f"--output={tmp_path / 'to' / 'out'}"]
        with open(tmp_path / "errors", "w") as errors, contextlib.redirect_stderr(errors):
            code = prepare_data.main(arguments)
        sys.exit(code)

    assert in_a_process(fill_the_disk) == 2
    assert (tmp_path / "errors").read_text().splitlines()[-1].startswith("error: output")
    assert not list((tmp_path / "to").iterdir())


def test_tool_interrupted_cleans_up(tmp_path: Path) -> None:
    # The tokenizer is loaded after the folder is made; a library that never comes holds the run there.
    (tmp_path / "slow.model").touch()
    (tmp_path / "library").mkdir()
    (tmp_path / "library/sentencepiece.py").write_text("import time\ntime.sleep(60)\n")
    (tmp_path / "in.txt").write_text("x")
    command = [sys.executable, "tools/prepare_data.py", str(tmp_path / "in.txt"), "--tokenizer"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "slow.model"), "--output", str(tmp_path / "out")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path / "library")}, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not (tmp_path / ".out.partial" / "lock").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and b"interrupted" in errors
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "library", "slow.model"]
