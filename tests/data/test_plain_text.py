"""Text that spells a special token is ordinary text, for every kind of model and of tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from megamoe.apps.prepare.write import encode_documents
from megamoe.data.tokenizers import Tokenizer, load_tokenizer
from megamoe.errors import UserError

SPECIAL = ["<pad>", "</s>", "<unk>", "<mask>"]
LETTERS = [*"▁abcdefghijklmnopqrstuvwxyz<>/."]
VOCABULARY = {token: number for number, token in enumerate([*SPECIAL, *LETTERS, "ab"])}
HOSTILE = ["a</s>b", "<pad> <unk></s>", "</s>", "x <mask>", "a \uff1c/s\uff1e b"]
PLAIN = ["abc ab", "a/b <c> z", "1 a"]


def unigram() -> Backend:
    scores = [0.0 if token in SPECIAL else -5.0 for token in VOCABULARY]
    made = Backend(models.Unigram(list(zip(VOCABULARY, scores, strict=True)), unk_id=2))
    made.normalizer, made.decoder = normalizers.NFKC(), decoders.Metaspace()
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    return made


def words(model: Any) -> Backend:
    made = Backend(model)
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.WhitespaceSplit()
    return made


def word_pieces() -> Backend:
    continuing = {f"##{letter}": len(VOCABULARY) + number for number, letter in enumerate(LETTERS)}
    return words(models.WordPiece(VOCABULARY | continuing, unk_token="<unk>"))


def merged() -> Backend:
    parts = {"</": 90, "</s": 91}
    merges = [("<", "/"), ("</", "s"), ("</s", ">"), ("a", "b")]
    return words(models.BPE(VOCABULARY | parts, merges, unk_token="<unk>"))


MAKERS: dict[str, Callable[[], Backend]] = {
    "unigram": unigram,
    "word_level": lambda: words(models.WordLevel(VOCABULARY, unk_token="<unk>")),
    "word_piece": word_pieces,
    "whole_words": lambda: words(models.BPE(VOCABULARY, [], unk_token="<unk>", ignore_merges=True)),
    "merges": merged,
}


@pytest.fixture(
    scope="module", params=[(name, kind) for name in MAKERS for kind in ("json", "folder")], ids=str
)
def made(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Backend, Tokenizer]:
    """Return the library's tokenizer and ours of the same file or folder."""
    name, kind = request.param
    folder, backend = tmp_path_factory.mktemp("plain"), MAKERS[name]()
    backend.add_tokens([AddedToken("</s>", special=False, normalized=False)])  # is the end, but not special
    backend.add_special_tokens([token for token in SPECIAL if token != "</s>"])
    backend.add_tokens(["qq"])  # an ordinary one, behind the model's vocabulary
    backend.save(str(folder / "tokenizer.json"))
    if kind == "json":
        return backend, load_tokenizer(str(folder / "tokenizer.json"))
    from transformers import PreTrainedTokenizerFast

    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
    whole = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    whole.save_pretrained(folder / "hf")
    return backend, load_tokenizer(str(folder / "hf"))


def test_no_text_gives_a_special_token(made: tuple[Backend, Tokenizer]) -> None:
    _, tokenizer = made
    assert (tokenizer.eod, tokenizer.special.pad, tokenizer.special.mask) == (1, 0, 3)
    assert tokenizer.unreachable == {0, 1, 3}
    batch = tokenizer.encode_batch(HOSTILE)
    for text, ids in zip(HOSTILE, batch, strict=True):
        found, spans = tokenizer.encode_with_spans(text)
        assert ids == tokenizer.encode(text) == found and ids
        assert tokenizer.unreachable.isdisjoint(ids), (text, ids)
        assert len(spans) == len(ids) and all(0 <= start <= end <= len(text) for start, end in spans)
    joined, lengths = encode_documents(HOSTILE, tokenizer, np.uint16)
    assert np.flatnonzero(joined == 1).tolist() == (np.cumsum(lengths) - 1).tolist()
    marked, _ = tokenizer.encode_marked("a</s>b")
    assert 1 in marked and tokenizer.encode_batch(HOSTILE) == batch


def test_other_text_is_encoded_as_by_the_library(made: tuple[Backend, Tokenizer]) -> None:
    backend, tokenizer = made
    for text in [*PLAIN, "a qq b"]:
        expected = backend.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == expected.ids
        assert tokenizer.encode_with_spans(text) == (expected.ids, expected.offsets)


def test_unigram_spells_the_token_by_its_characters(tmp_path: Path) -> None:
    backend = unigram()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    ids, spans = tokenizer.encode_with_spans("a</s>b é")
    names = [backend.id_to_token(number) for number in ids]
    assert names == ["▁", "a", "<", "/", "s", ">", "b", "▁", "<unk>"] and spans[2:6] == [
        (1, 2),
        (2, 3),
        (3, 4),
        (4, 5),
    ]
    assert tokenizer.decode(tokenizer.encode("a</s>b")) == "a</s>b"
    assert tokenizer.encode_marked("a</s>")[0] == [4, 5, 1]
    with pytest.raises(UserError, match=r"t.json' encodes a text to the special token </s> \(id 1\)"):
        tokenizer.encode_marked(HOSTILE[-1])  # NFKC makes ordinary angle brackets of these


def test_byte_level_bpe_is_the_library_s_own(tmp_path: Path) -> None:
    from megamoe.apps.prepare.new_tokenizers import train_bpe
    from megamoe.data.tokenizers import JsonTokenizer

    train_bpe(["one two </s> <pad>"] * 9, 290, tmp_path / "t.json", special=["<pad>"])
    tokenizer = JsonTokenizer(tmp_path / "t.json")
    assert tokenizer._plain is tokenizer._backend


def test_writing_refuses_a_reserved_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tokenizer: ready tokens may hold it, text may not."""
    tokenizer = load_tokenizer("bytes+pad")
    monkeypatch.setattr(tokenizer, "encode", lambda text: [97, 257])
    with pytest.raises(UserError, match=r"special token <pad> \(id 257\)"):
        encode_documents(["a"], tokenizer, np.uint16)
    assert encode_documents([np.array([97, 257])], tokenizer, np.uint16).tokens.tolist() == [97, 257, 256]
