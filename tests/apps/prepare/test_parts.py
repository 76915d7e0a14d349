"""Data prepared in parts: equal to one piece, byte for byte; finished parts outlive errors and kills."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megamoe.apps.prepare import parts as parts_module
from megamoe.apps.prepare import prepare as prepare_module
from megamoe.apps.prepare.index_writer import read_lengths, token_dtype, write_index
from megamoe.apps.prepare.prepare import Preparation, prepare
from megamoe.apps.prepare.sources import Source
from megamoe.data import index_file
from megamoe.data.card import DataFiles, check_files, load_card
from megamoe.data.index_file import check_arithmetic, read_header, tokens_before
from megamoe.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
ENDINGS = (".bin", ".idx", ".counts.npy", ".card.json")

# Prepares argv[2:] to argv[1] in parts of 1 KB and ends by SIGKILL when 3 parts have a record.
KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from megamoe.apps.prepare import prepare as module
if __name__ == "__main__":
    module.PART_BYTES, folder = 1000, Path(sys.argv[1]).parent / ".out.partial/parts"
    def kill():
        while len(list(folder.glob("*.json"))) < 3:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=kill, daemon=True).start()
    module.prepare(module.Preparation(sys.argv[1], sys.argv[2:], workers=2, progress=False))
    time.sleep(60)
"""


def test_the_index_equals_megatron_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "CHUNK", 1000)
    generator = np.random.default_rng(1)
    for vocab_size in (100, 65499, 65500, 200_000):
        dtype = token_dtype(vocab_size)
        assert dtype is DType.optimal_dtype(vocab_size)
        lengths_N = generator.integers(0, 9, 2501)
        builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
        builder.sequence_lengths = lengths_N.tolist()
        builder.document_indices = list(range(len(lengths_N) + 1))
        builder.finalize(str(tmp_path / "theirs.idx"))
        ours = tmp_path / "ours.idx"
        write_index(ours, dtype, np.array_split(lengths_N, 7))
        assert ours.read_bytes() == (tmp_path / "theirs.idx").read_bytes()
    assert np.array_equal(np.concatenate(list(read_lengths(ours))), lengths_N)
    assert tokens_before(ours, 1000) == lengths_N[:1000].sum()
    assert tokens_before(ours, len(lengths_N)) == lengths_N.sum()
    assert check_arithmetic(ours, 4 * int(lengths_N.sum()))[0] == read_header(ours)[0]
    with pytest.raises(UserError, match="a document has 3000000000 tokens"):
        write_index(ours, np.int32, [np.array([3_000_000_000])])


def make_sources(folder: Path, number: int = 12) -> list[str]:
    folder.mkdir()
    for place in range(number):
        texts = [f"{place} {line} " * (place + line) for line in range(9)]
        texts = [" "] * 100 if place == 5 else texts  # a part without a document
        (folder / f"{place:02}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return [str(path) for path in sorted(folder.iterdir())]


def run(output: Path, inputs: list[str], workers: int = 1) -> None:
    prepare(Preparation(str(output), inputs, workers=workers, progress=False))


def contents(output: Path) -> list[bytes]:
    check_files(str(output), load_card(str(output)))
    return [Path(f"{output}{ending}").read_bytes() for ending in ENDINGS]


def test_sources_are_cut_by_size_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []
    for name, size in {"a": 5, "b": 5, "c": 30, "d": 1, "e": 1}.items():
        (tmp_path / name).write_bytes(bytes(size))
        sources.append(Source(name, tmp_path / name))

    def names(smallest: int) -> list[str]:
        return ["".join(source.name for source in group) for group in parts_module.cut(sources, smallest)]

    assert names(10) == ["ab", "c", "de"] and names(1) == [*"abcde"] and names(99) == ["abcde"]
    monkeypatch.setattr(parts_module, "MOST_PARTS", 2)
    assert names(1) == ["abc", "de"]


def test_parts_equal_one_piece_and_outlive_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_sources(tmp_path / "in")
    run(tmp_path / "whole", inputs)
    monkeypatch.setattr(prepare_module, "PART_BYTES", 1000)
    (tmp_path / "out").mkdir()
    run(tmp_path / "out/parts", inputs)
    assert contents(tmp_path / "out/parts") == contents(tmp_path / "whole")
    assert len(os.listdir(tmp_path / "out")) == 4
    # An error in one part, here in the eighth file, keeps those before it.
    written: list[str] = []
    original = prepare_module._write_part

    def spied(*arguments: object) -> dict[str, object]:
        part = arguments[-1]
        written.extend(source.path.name for source in part.sources)  # type: ignore[attr-defined]
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(prepare_module, "_write_part", spied)
    right = Path(inputs[7]).read_text()
    Path(inputs[7]).write_text(right[:-2])
    with pytest.raises(UserError, match=r"07\.jsonl:9: not JSON"):
        run(tmp_path / "broken", inputs)
    assert not (tmp_path / "broken.bin").exists() and (tmp_path / ".broken.partial").exists()
    Path(inputs[7]).write_text(right)
    # Another file has changed meanwhile: its part is written again as well.
    os.utime(inputs[6], (1, 1))
    done, written[:] = list(written), []
    run(tmp_path / "broken", inputs)
    assert "07.jsonl" in done and "11.jsonl" not in done
    assert "06.jsonl" in written and {"07.jsonl", "11.jsonl"} < set(written)
    assert not {"00.jsonl", "01.jsonl"} & set(written)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
    assert not (tmp_path / ".broken.partial").exists()


def test_a_tokenizer_that_is_trained_again_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_sources(tmp_path / "in", 3)
    monkeypatch.setattr(prepare_module, "PART_BYTES", 200)

    def trained(output: Path, vocab_size: int) -> list[bytes]:
        options: dict[str, Any] = {"tokenizer": "train", "vocab_size": vocab_size, "progress": False}
        prepare(Preparation(str(output), inputs, overwrite=True, **options))
        return contents(output)[:3]  # the card names the tokenizer's file

    first, second = trained(tmp_path / "out", 260), trained(tmp_path / "out", 280)
    assert first != second == trained(tmp_path / "other", 280)


def test_a_kill_while_parts_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_sources(tmp_path / "in")
    run(tmp_path / "whole", inputs)
    monkeypatch.setattr(prepare_module, "PART_BYTES", 1000)
    groups = parts_module.cut(prepare_module.find_sources(inputs, False), 1000)
    unlink, count = Path.unlink, iter(range(99))

    def dies(path: Path, missing_ok: bool = False) -> None:
        """Fail before the third part is deleted, when it has been appended."""
        if path.suffix == ".bin" and path.parent.name == "parts" and next(count) == 2:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", dies)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", inputs)
    monkeypatch.setattr(Path, "unlink", unlink)
    folder = tmp_path / ".out.partial"
    assert len(list((folder / "parts").glob("*.bin"))) == len(groups) - 2
    monkeypatch.setattr(prepare_module, "_write_part", lambda *_: pytest.fail("tokenized again"))
    run(tmp_path / "out", inputs)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_parts_that_are_gone_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part without .bin counts as appended only if it, and all parts before it, lie in the joined file."""
    parts = [parts_module.Part(DataFiles(tmp_path / f"{n}"), (), "key") for n in range(4)]
    for part in parts:
        for file in (part.files.bin, part.files.idx, part.files.counts):
            file.write_bytes(b"1234")
        part.finish({})
    joined = tmp_path / "joined"
    assert parts_module.unfinished(parts, joined) == []
    for part in parts[:3]:
        part.files.bin.unlink()
    joined.write_bytes(bytes(12))
    assert parts_module.unfinished(parts, joined) == []
    joined.write_bytes(bytes(11))
    assert parts_module.unfinished(parts, joined) == [parts[2]]
    parts[0].discard()
    joined.write_bytes(bytes(12))
    assert parts_module.unfinished(parts, joined) == parts[:3]


@pytest.mark.full
def test_a_killed_run_goes_on_in_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_sources(tmp_path / "in", 24)
    run(tmp_path / "whole", inputs)
    monkeypatch.setattr(prepare_module, "PART_BYTES", 1000)
    (tmp_path / "killed.py").write_text(KILLED)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "killed.py"), str(tmp_path / "out"), *inputs],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL and not (tmp_path / "out.bin").exists()
    deadline = time.monotonic() + 30  # the workers end by themselves, and with them the last part
    records = list((tmp_path / ".out.partial/parts").glob("*.json"))
    assert len(records) >= 3
    while True:
        try:
            run(tmp_path / "out", inputs, workers=2)
            break
        except UserError as error:
            assert "another run" in str(error) and time.monotonic() < deadline
            time.sleep(0.2)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
