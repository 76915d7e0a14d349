"""Documents that do not end with the end-of-document token: their boundaries are those of the .idx."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

import megamoe.data.boundaries
from megamoe.data.batches import document_items
from megamoe.data.boundaries import DocumentStarts, Ends, count_ends
from megamoe.errors import UserError
from tests.support.data.sources import EOD, build, config, make_data

LENGTHS = [[5], [9, 0], [1], [7], [3, 4], [0], [8], [2]] * 3  # of the sequences of each document


def write(prefix: Path, documents: Sequence[Sequence[Sequence[int]]]) -> str:
    """Write documents of sequences of tokens, as Megatron-LM's preprocess_data.py does."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for sequences in documents:
        builder.add_document(np.concatenate(sequences), [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def counted(lengths: list[list[int]], ends: bool = False) -> list[list[list[int]]]:
    """Return documents of which each token is another; with `ends` each ends with EOD."""
    numbers = iter(range(EOD))
    made = [[[next(numbers) for _ in range(length)] for length in document] for document in lengths]
    for document in made if ends else ():
        document[-1].append(EOD)
    return made


@pytest.mark.parametrize("order", ["documents", "samples"])
@pytest.mark.parametrize("verify", ["full", "structure"])
def test_documents_without_end_tokens(tmp_path: Path, order: str, verify: str, capsys: Any) -> None:
    documents = counted(LENGTHS)
    bare = write(tmp_path / "bare", documents)
    ended = make_data(tmp_path / "ended", ["xyz"] * 40)
    # Megatron-Core shuffles sequences, not documents.
    units = [sequence for document in documents for sequence in document]
    if order == "samples":
        units = [[token for sequence in document for token in sequence] for document in documents]
    last = [unit[-1] for unit in units if unit]
    how: dict[str, Any] = {"document_aware": True, "order": order, "verify": verify, "sequence_length": 16}
    train = build(config(bare, ended, **how, tokenizer="bytes"), train=24).train
    told = f"bare': 21 of 21 documents do not end with the end-of-document token {EOD};"
    assert capsys.readouterr().err.count(told) == 1
    met = check_ends(train, 24, [*last, EOD])
    assert len(met) > 12 and EOD in met


def check_ends(dataset: Any, samples: int, last: list[int]) -> set[int]:
    """Check that documents end at the tokens `last` and nowhere else; return those that occur."""
    met: set[int] = set()
    for index in range(samples):
        item = dataset[index]
        is_end_S = torch.isin(item["tokens"], torch.tensor(last))
        expected = document_items(is_end_S.long(), eod=1)
        assert all(torch.equal(item[key], expected[key]) for key in expected), item
        met |= set(item["tokens"][is_end_S].tolist())
    return met


@pytest.mark.parametrize("order", ["documents", "samples"])
def test_data_with_end_tokens_are_as_before(tmp_path: Path, order: str) -> None:
    """Also with several sequences in a document, of which the last alone ends with the token."""
    path = write(tmp_path / "a", counted(LENGTHS, ends=True))
    data = config(path, document_aware=True, order=order, tokenizer="bytes")
    check_ends(build(data, train=20).train, 20, [EOD])


def test_counts_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", [[[1, 2], [9]], [[9, 3]], [[]], [[4, 9]], [[9]], [[5]]])
    assert list(DocumentStarts(tmp_path / "a.idx")) == [0, 3, 5, 5, 7, 8, 9]
    assert DocumentStarts(tmp_path / "a.idx").between(3, 8) == [5, 5, 7]
    for chunk_bytes, index_chunk in ((1 << 22, 1 << 18), (2, 1), (6, 4)):
        monkeypatch.setattr(megamoe.data.boundaries, "CHUNK_BYTES", chunk_bytes)
        monkeypatch.setattr(megamoe.data.boundaries, "CHUNK", index_chunk)
        assert count_ends(Path(path), 9, np.inf) == Ends(documents=5, ended=3, tokens=4)
    assert count_ends(Path(path), 9, 6) == Ends(documents=1, ended=1, tokens=1)


def test_an_end_token_of_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = write(tmp_path / "other", [[[7, EOD, 8, 3]], [[9, 3]], [[EOD, 3]]])
    aware: dict[str, Any] = {"document_aware": True, "tokenizer": "bytes", "sequence_length": 3}
    wrong = rf"other': 3 of 3 documents .* token {EOD}, which occurs 2 times; set data.tokenizer"
    with pytest.raises(UserError, match=wrong):
        build(config(other, **aware))
    build(config(other, **aware | {"document_aware": False}))
    # Where half of the documents have the token, it is the right one, and the others get the .idx's boundary.
    monkeypatch.setattr("megamoe.data.verify.SETTLED_S", 0)
    mixed = config(write(tmp_path / "mixed", [[[1, EOD]], [[3, 4]], [[5, 6, EOD]], [[7, 8]]]), **aware)
    assert check_ends(build(mixed).train, 10, [4, 8, EOD]) == {4, 8, EOD}
    for known in ("megamoe.data.boundaries.count_ends", "megamoe.data.verify.scan"):
        monkeypatch.delattr(known)  # what is known is kept
    check_ends(build(mixed).train, 10, [4, 8, EOD])
