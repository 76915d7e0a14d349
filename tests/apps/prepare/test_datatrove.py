"""Datasets from datatrove's pipelines: the steps by themselves, and the example on a process pool."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megamoe.apps.prepare.prepare import Preparation, prepare
from megamoe.apps.prepare.verify import verify_in_full
from megamoe.data.card import DataFiles, load_card
from megamoe.errors import UserError

pytest.importorskip("datatrove", reason="the extra datatrove is not installed")
ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "examples/data"))  # where token_steps.py is
PAGE = (ROOT / "docs/change/architecture.md").read_text().split()
WORDS = sorted({word for word in PAGE if word.isalpha() and word.isascii() and len(word) > 3})
COMMON = ["the", "of", "and", "to", "in", "that", "for", "as", "was", "with", "be", "by"]


def contents(prefix: Path) -> list[bytes]:
    """The files of a dataset, which is verified."""
    verify_in_full(str(prefix))
    return [
        Path(f"{prefix}{ending}").read_bytes() for ending in (".bin", ".idx", ".counts.npy", ".card.json")
    ]


def write_tasks(prefix: Path, texts: list[str], tasks: int) -> None:
    from datatrove.data import Document
    from token_steps import WriteTokens

    step = WriteTokens(str(prefix), "bytes")
    for rank in range(tasks):
        shard = [Document(text, str(number)) for number, text in enumerate(texts[rank::tasks])]
        list(step.run(iter(shard), rank, tasks))


def test_parts_of_tasks_are_merged(tmp_path: Path) -> None:
    """Equal to our own preparation of the same documents, but for the sources in the card."""
    from token_steps import MergeTokens

    texts = [f"né {number} " * number for number in range(20)]
    merge = MergeTokens(str(tmp_path / "out"), "bytes", 3)
    write_tasks(tmp_path / "out", texts, 3)
    (DataFiles(tmp_path / "out").partial / "parts/00001.json").unlink()
    with pytest.raises(UserError, match="1 of 3 tasks have not finished, the first is 00001"):
        merge.merge()
    write_tasks(tmp_path / "out", texts, 3)
    card = merge.merge()
    lines = [json.dumps({"text": text}) for rank in range(3) for text in texts[rank::3]]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    inputs = [str(tmp_path / "in.jsonl")]
    ours = prepare(Preparation(str(tmp_path / "ours"), inputs, progress=False))
    assert contents(tmp_path / "out")[:3] == contents(tmp_path / "ours")[:3]
    found, expected = (vars(each) for each in (card, ours))
    assert all(found[key] == expected[key] for key in ("documents", "empty_documents", "text_bytes"))
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(UserError, match="exists"):
        merge.merge()


def english(draw: random.Random, words: int = 80) -> str:
    """Return words of a page, and the common words that make a text English."""
    found = [draw.choice(WORDS if draw.random() < 0.65 else COMMON) for _ in range(words)]
    return " ".join(found) + "."


def make_raw(folder: Path) -> None:
    """Parquet files of English texts, and such as the filters remove: German, short, twice, held out."""
    import pyarrow
    from pyarrow import parquet

    draw = random.Random(1)
    held_out = english(draw)
    texts: list[Any] = [english(draw) for _ in range(60)]
    texts += ["der die das und ist nicht ein Haus " * 20, "the cat", texts[3], texts[5] + " more", held_out]
    draw.shuffle(texts)
    (folder / "raw").mkdir()
    for number in range(4):
        shard = texts[number::4]
        rows = pyarrow.table({"text": shard, "id": [f"{number}-{n}" for n in range(len(shard))]})
        parquet.write_table(rows, folder / f"raw/{number}.parquet")
    (folder / "held_out").mkdir()
    (folder / "held_out/a.jsonl").write_text(json.dumps({"text": held_out, "id": "0"}) + "\n")


def command_of(folder: Path, name: str, *options: str) -> list[str]:
    return [
        *(sys.executable, str(ROOT / "examples/data/pipeline.py"), str(folder / "raw"), str(folder / name)),
        *("--tokenizer", "bytes", "--work", str(folder / f"work_{name}"), "--tasks", "3"),
        *("--language", "stopwords"),
        *("--held-out", str(folder / "held_out"), *options),
    ]  # fmt: skip


def run_example(folder: Path, name: str, *options: str) -> None:
    command = command_of(folder, name, *options)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.full
def test_the_example_on_a_pool_of_processes(tmp_path: Path) -> None:
    pytest.importorskip("spacy", reason="the extra datatrove is not installed whole")
    make_raw(tmp_path)
    for workers in (1, 2):
        run_example(tmp_path, f"w{workers}", "--workers", f"{workers}")
    assert contents(tmp_path / "w1") == contents(tmp_path / "w2")
    card = load_card(str(tmp_path / "w1"))
    assert card is not None
    counts = {step.name: step.counts for step in card.steps}
    dropped = {name: found["dropped"] for name, found in counts.items() if found.get("dropped")}
    # The German text; the short one; the two near-duplicates; the held-out text.
    assert sum(dropped.values()) == 5, counts
    assert card.documents == 60
    indexed = IndexedDataset(str(tmp_path / "w1"))
    assert len(indexed) == 60
