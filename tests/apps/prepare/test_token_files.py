"""Files of token ids without an index: llm.c's with its header, nanoGPT's without."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer as Backend
from tokenizers import models

import megamoe.apps.prepare.token_files
from megamoe.apps.prepare.prepare import Preparation, prepare
from megamoe.data.card import load_card
from megamoe.errors import UserError

EOD = 256
DOCUMENTS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


def llm_c(tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.array(tokens, "<u2" if magic == 20240520 else "<u4").tobytes()


def joined(behind: bool) -> list[int]:
    """Return the documents with the end token behind each, or before each."""
    return [token for document in DOCUMENTS for token in ([*document, EOD] if behind else [EOD, *document])]


def run(folder: Path, content: bytes, name: str = "in.bin", **options: Any) -> list[list[int]]:
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    prepare(Preparation(str(folder / "out"), [str(folder / name)], progress=False, **options))
    indexed = IndexedDataset(str(folder / "out"))
    return [indexed[number].tolist() for number in range(len(indexed))]


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 4])
@pytest.mark.parametrize(
    ("content", "options"),
    [
        (llm_c(joined(behind=False)), {}),
        (llm_c(joined(behind=False), 20240801, 7), {"name": "in.bin.gz", "shuffle_files": 1}),
        (np.array(joined(behind=True), "<u2").tobytes(), {"raw_ids": "uint16"}),
        (np.array(joined(behind=True)[:-1], "<u4").tobytes(), {"raw_ids": "uint32"}),
    ],
    ids=["gpt_2", "llama_3", "uint16", "uint32"],
)
def test_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, content: bytes, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(megamoe.apps.prepare.token_files, "CHUNK_BYTES", chunk_bytes)
    assert run(tmp_path, content, **options) == [[*document, EOD] for document in DOCUMENTS]
    card = load_card(str(tmp_path / "out"))
    assert card is not None and (card.tokenizer.reference, card.tokenizer.eod) == ("bytes", EOD)
    assert (card.documents, card.empty_documents, card.tokens) == (4, 0, 14)


def test_the_card_of_gpt_2_s_tokens(tmp_path: Path) -> None:
    made = Backend(models.BPE({f"token {number}": number for number in range(50_256)}, []))
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    content = llm_c([50_256, 464, 50_255, 50_256, 13])
    found = run(tmp_path, content, tokenizer=str(tmp_path / "tokenizer.json"))
    assert found == [[464, 50_255, 50_256], [13, 50_256]]
    card = load_card(str(tmp_path / "out"))
    assert card is not None and card.dtype == "uint16"
    assert (card.tokenizer.reference, card.tokenizer.vocab_size, card.tokenizer.eod) == (
        "tokenizer.json",
        50_257,
        50_256,
    )


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (llm_c([1, 2], version=2), {}, "version 2 and 1024 bytes, expected 1"),
        (llm_c([1, 2])[:900], {}, "version 1 and 900 bytes, expected 1 and 1024"),
        (llm_c([1, 2], count=3), {}, "has 2 tokens, its header says 3"),
        (llm_c([1, 2])[:-1], {}, "truncated within a token of uint16"),
        (llm_c([1, 2], magic=20240522), {}, "no header of llm.c .* found 20240522.; add --raw-ids"),
        (b"\1\0\2\0", {}, "no header of llm.c .*add --raw-ids"),
        (b"\1\0\2", {"raw_ids": "uint16"}, "truncated within a token of uint16"),
        (b"\1\0\1\1", {"raw_ids": "uint16"}, "token id 257 is outside of the tokenizer's vocabulary of 257"),
        (b"", {"raw_ids": "uint16"}, "no text"),
        (
            b"\1\0",
            {"raw_ids": "uint16", "tokenizer": "train"},
            "name the tokenizer that made them, not train",
        ),
        (b"\1\0", {"raw_ids": "uint16", "where": ["a == 1"]}, "--where is for"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"in\.bin.*{message}|{message}") as caught:
        run(tmp_path, content, **options)
    assert "\n" not in str(caught.value) and not list(tmp_path.glob("*out*"))
