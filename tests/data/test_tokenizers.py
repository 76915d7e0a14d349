"""Each kind of tokenizer: round trip, end of document, identity, and errors that name the way out."""

import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend

from megamoe.apps.prepare.new_tokenizers import train_bpe
from megamoe.data.tokenizers import END_OF_DOCUMENT, Tokenizer, load_tokenizer
from megamoe.errors import UserError

CODE = "def add(a, b):\n    return a + b\n"
TEXTS = [CODE, "größer 日本語 \t end\r\n", "one two one two one two", "🙂"] * 5


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tokenizers")
    train_bpe(TEXTS, 300, folder / "tokenizer.json")
    from transformers import PreTrainedTokenizerFast  # takes two seconds

    file = str(folder / "tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file, eos_token=END_OF_DOCUMENT).save_pretrained(folder / "hf")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three four", "five six seven eight"] * 20),
        model_prefix=str(folder / "sp"),
        vocab_size=23,
        character_coverage=1.0,
        minloglevel=2,
    )
    return {
        "bytes": "bytes",
        "json": str(folder / "tokenizer.json"),
        "folder": str(folder / "hf"),
        "sentencepiece": str(folder / "sp.model"),
    }


@pytest.fixture(params=["bytes", "json", "folder", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, references: dict[str, str]) -> Tokenizer:
    return load_tokenizer(references[request.param])


def test_round_trip(tokenizer: Tokenizer, references: dict[str, str]) -> None:
    # SentencePiece normalises spaces by design: it gets a text that needs none.
    texts = ["two six one"] if tokenizer.name == references["sentencepiece"] else TEXTS
    for text in texts:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode([*tokens, tokenizer.eod]) == text
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_a_document_cannot_contain_an_end_of_document_token(tokenizer: Tokenizer) -> None:
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    assert tokenizer.eod not in tokenizer.encode(f"a {END_OF_DOCUMENT} b </s> c")


def test_bytes_by_hand() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]


def test_trained_bpe_holds_bytes_merges_and_end_of_document(references: dict[str, str]) -> None:
    tokenizer = load_tokenizer(references["json"])
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([tokenizer.eod]) == ""
    # A byte never seen in training is still encoded: byte-level, no unknown token.
    assert tokenizer.decode(tokenizer.encode("ÿ\x01")) == "ÿ\x01"
    # 43 merges of so small a text make "one" or " two" a single token.
    assert len(tokenizer.encode("one two one two")) < 8


def test_truncation_and_padding_of_a_file_are_off(tmp_path: Path, references: dict[str, str]) -> None:
    backend = Backend.from_file(references["json"])
    backend.enable_truncation(8)
    backend.enable_padding(length=12, pad_id=5)
    backend.save(str(tmp_path / "t.json"))
    found, wanted = load_tokenizer(str(tmp_path / "t.json")), load_tokenizer(references["json"])
    for text in (CODE * 100, "one"):  # longer than 8 tokens, and shorter than 12
        assert found.encode(text) == wanted.encode(text)
        assert found.encode_batch([text]) == [wanted.encode(text)]
        assert found.encode_with_spans(text) == wanted.encode_with_spans(text)
        assert found.decode(found.encode(text)) == text


def test_training_is_deterministic(tmp_path: Path, references: dict[str, str]) -> None:
    train_bpe(iter(TEXTS), 300, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == Path(references["json"]).read_bytes()


def test_fingerprint_is_of_the_content(tmp_path: Path, references: dict[str, str]) -> None:
    fingerprints = {kind: load_tokenizer(reference).fingerprint for kind, reference in references.items()}
    assert len(set(fingerprints.values())) == 4
    assert all(len(bytes.fromhex(fingerprint)) == 32 for fingerprint in fingerprints.values())
    copy = tmp_path / "moved.json"
    copy.write_bytes(Path(references["json"]).read_bytes())
    assert load_tokenizer(str(copy)).fingerprint == fingerprints["json"]
    train_bpe(TEXTS, 299, copy)
    assert load_tokenizer(str(copy)).fingerprint != fingerprints["json"]


def test_vocabulary_too_small_for_the_bytes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"vocab_size 256.*257"):
        train_bpe(TEXTS, 256, tmp_path / "t.json")


@pytest.mark.parametrize("name", ["missing.json", "broken.json", "broken.model", "empty_folder", "notes.txt"])
def test_missing_or_broken_reference(tmp_path: Path, name: str) -> None:
    if name == "empty_folder":
        (tmp_path / name).mkdir()
    elif name != "missing.json":
        (tmp_path / name).write_text("{")
    with pytest.raises(UserError, match=name) as caught:
        load_tokenizer(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_without_end_of_document(tmp_path: Path, references: dict[str, str]) -> None:
    content = json.loads(Path(references["json"]).read_text())
    content["added_tokens"] = []
    content["model"]["vocab"] = {
        ("x" if token == END_OF_DOCUMENT else token): number
        for token, number in content["model"]["vocab"].items()
    }
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"no end-of-document token.*<\|endoftext\|>"):
        load_tokenizer(str(tmp_path / "t.json"))


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil"}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(UserError):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_a_trained_tokenizer_splits_text_by_the_rule_of_gpt2(tmp_path: Path) -> None:
    """docs/models/hugging_face.md tells users of llama.cpp so; the regular expression is Radford et al.'s."""
    from tokenizers import Regex, pre_tokenizers

    train_bpe(["a b"], 260, tmp_path / "tokenizer.json")
    rule = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
    split = pre_tokenizers.Split(Regex(rule), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    expected = pre_tokenizers.Sequence([split, bytes_of])
    text = " \n \n\n \t\t a  b 🚀 (x)333 3.3 កាន់ 我想apple2天 -=-= нещо ''```\"\"!!?? I've 'RE we'Ll \u200d  "
    found = Backend.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    assert found is not None and found.pre_tokenize_str(text) == expected.pre_tokenize_str(text)
