"""Reserved tokens: their ids in each kind of tokenizer, in the card, and in a run's vocabulary."""

from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from megamoe.apps.prepare.new_tokenizers import load_with_special, train_bpe, train_sentencepiece
from megamoe.apps.prepare.prepare import Preparation, prepare
from megamoe.config.schema import DataConfig, SourceConfig
from megamoe.data.card import DataFiles, load_card
from megamoe.data.special import SpecialTokens, expand, language_tag
from megamoe.data.tokenizers import END_OF_DOCUMENT, load_tokenizer
from megamoe.data.vocabulary import resolve_vocabulary
from megamoe.errors import UserError

OPTION = "pad,mask,sentinels=3,<2de>,<2zh_Hans>,<cls>"
NAMES = ["<pad>", "<mask>", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>", "<2de>", "<2zh_Hans>", "<cls>"]
TEXT = "one two <mask> <2de> <pad> three"


def test_option_by_hand() -> None:
    assert expand(OPTION) == NAMES
    assert expand("") == []
    assert expand("sentinels")[-1] == "<extra_id_99>" and len(expand("sentinels, sentinels=2")) == 100
    for wrong in ("pads", "sentinels=0", "sentinels=x", "<a b>", "mask=2"):
        with pytest.raises(UserError, match=r"special '.*'.*expected pad, mask"):
            expand(wrong)


def test_ids_by_name() -> None:
    special = SpecialTokens({"<pad>": 1, "<extra_id_0>": 7, "<extra_id_1>": 5, "<extra_id_3>": 9, "<2de>": 4})
    assert (special.pad, special.mask) == (1, None)
    assert special.sentinels == (7, 5)  # up to the gap
    assert special.languages == {"de": 4}
    assert language_tag("de") == "<2de>"


def test_trained_tokenizer_reserves_the_first_ids(tmp_path: Path) -> None:
    train_bpe([TEXT] * 5, 300, tmp_path / "t.json", expand(OPTION))
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    assert tokenizer.eod == 0
    assert dict(tokenizer.special.ids) == {name: place for place, name in enumerate(NAMES, start=1)}
    tokens = tokenizer.encode(TEXT)
    assert min(tokens) > len(NAMES) and tokenizer.decode(tokens) == TEXT
    assert tokenizer.decode([1, *tokens, 2, 3]) == TEXT
    with pytest.raises(UserError, match=r"vocab_size 264.*265"):
        train_bpe([TEXT], 264, tmp_path / "t.json", expand(OPTION))


def test_tokenizers_of_other_libraries(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast  # takes two seconds

    train_bpe([TEXT] * 5, 300, tmp_path / "t.json", expand(OPTION))
    folder = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "t.json"), eos_token=END_OF_DOCUMENT)
    folder.save_pretrained(tmp_path / "hf")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three four", "five six seven eight"] * 20),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=25,
        control_symbols=["<mask>", "<2de>"],
        pad_id=3,
        minloglevel=2,
    )
    of_folder = load_tokenizer(str(tmp_path / "hf"))
    assert of_folder.special == load_tokenizer(str(tmp_path / "t.json")).special
    of_model = load_tokenizer(str(tmp_path / "sp.model"))
    assert (of_model.special.pad, of_model.special.mask) == (3, 4)
    assert of_model.special.languages == {"de": 5}
    for tokenizer in (of_folder, of_model):
        assert not {*tokenizer.encode(TEXT)} & {*tokenizer.special.ids.values()}


def test_trained_sentencepiece(tmp_path: Path) -> None:
    texts = ["one two  three", "größer als 日本語", "%(name)s {x}\nline"] * 20
    for name in ("a.model", "b.model"):
        train_sentencepiece(iter(texts), 420, tmp_path / name, expand(OPTION))
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()
    tokenizer = load_tokenizer(str(tmp_path / "a.model"))
    assert tokenizer.eod == 1
    assert {name: tokenizer.special.ids[name] for name in NAMES} == {
        name: place for place, name in enumerate(NAMES, start=2)
    }
    for text in [*texts[:3], TEXT, "never seen: Ж 🙂"]:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode([*tokens, tokenizer.eod]) == text
        assert not {*tokens} & {*tokenizer.special.ids.values()}
    with pytest.raises(UserError, match=r"vocab_size 100: SentencePiece cannot train.*") as caught:
        train_sentencepiece(iter(texts), 100, tmp_path / "c.model", expand(OPTION))
    assert "\n" not in str(caught.value)


def test_an_ordinary_token_of_that_spelling_is_not_reserved(tmp_path: Path) -> None:
    train_bpe([TEXT] * 5, 300, tmp_path / "t.json")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "t.json"))
    backend.add_tokens(["<mask>"])
    backend.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    assert tokenizer.vocab_size - 1 in tokenizer.encode(TEXT)
    assert not tokenizer.special.ids


def test_bytes_with_reserved_tokens() -> None:
    tokenizer = load_with_special("bytes", "pad,mask,<2de>")
    assert tokenizer.name == "bytes+pad,mask,<2de>"
    assert (tokenizer.vocab_size, tokenizer.eod) == (260, 256)
    assert dict(tokenizer.special.ids) == {"<pad>": 257, "<mask>": 258, "<2de>": 259}
    assert tokenizer.decode([97, 258, 98]) == "ab"
    same = load_tokenizer(tokenizer.name)
    assert same.fingerprint == tokenizer.fingerprint != load_tokenizer("bytes").fingerprint
    with pytest.raises(UserError, match=r"tokenizer 'bytes\+pad' does not reserve <mask>;.*train"):
        load_with_special("bytes+pad", "pad,mask")


@pytest.mark.parametrize("tokenizer", ["train", "bytes"])
def test_card_and_vocabulary_know_the_ids(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    output = tmp_path / "out"
    options = {"tokenizer": tokenizer, "vocab_size": 300, "special": OPTION}
    prepare(Preparation(str(output), [str(tmp_path / "a.txt")], progress=False, **options))  # type: ignore[arg-type]
    card = load_card(str(output))
    assert card is not None and list(card.tokenizer.special) == NAMES
    data = DataConfig(sources=[SourceConfig(path=str(output))])
    assert dict(resolve_vocabulary(data, None).special.ids) == card.tokenizer.special
    if tokenizer == "train":  # the file is gone: by the card alone
        DataFiles(output).tokenizer.unlink()
        found = resolve_vocabulary(data, None)
        assert found.tokenizer is None and dict(found.special.ids) == card.tokenizer.special
