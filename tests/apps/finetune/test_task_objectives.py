"""Objectives of tasks: examples against a search by hand, losses against plain PyTorch, best spans."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tokenizers as tokenizers_library
import torch
from torch.nn import functional

from megamoe.apps.finetune.label_files import NO_TAG
from megamoe.apps.finetune.objectives.labelled import Labelled
from megamoe.apps.finetune.objectives.tagging import first_tokens
from megamoe.apps.prepare.new_tokenizers import train_bpe, train_sentencepiece
from megamoe.config import RunConfig
from megamoe.data.batches import Batch
from megamoe.data.tokenizers import load_tokenizer
from megamoe.errors import UserError
from megamoe.model.architectures.encoder import Encoder
from megamoe.model.heads.labels import LabelHead
from megamoe.model.size import model_flops, model_size
from megamoe.train.resolved import resolve_run
from megamoe.train.step import model_inputs
from tests.support.apps.tasks import answers, regression, tagging, write_jsonl
from tests.support.data.labelled import labelled_config
from tests.support.refusals import Case, cases, told
from tests.support.tiny import tiny_model

END = 256
OUTPUTS = {
    "tagging": ("tags", 2),
    "span": ("span", 2),
    "regression": ("number", 1),
    "classification": ("label", 2),
}
ROWS = {
    "tagging": tagging(0, 9),
    "span": answers(0, 9),
    "regression": regression(0, 9),
    "classification": [{"text": "a" * size, "label": "AB"[size % 2]} for size in range(1, 9)],
}
HEADS = [
    ("tagging", ()),
    ("span", ()),
    ("regression", ()),
    ("classification", ()),
    ("classification", ("model.pooling=first",)),
    ("classification", ("model.pooling=first", "model.pooler=true")),
    ("classification", ("model.pooler=true", "train.label_smoothing=0.1")),
]


def config_of(
    folder: Path, name: str, rows: list[dict[str, Any]], *overrides: str, **options: Any
) -> RunConfig:
    folder.mkdir(exist_ok=True)
    write_jsonl(folder / "train.jsonl", rows)
    (folder / "labels.json").write_text(json.dumps({"labels": ["A", "B"]}))
    predicts, outputs = OUTPUTS[name]
    more = ("data.split=[1, 0, 0]", f"model.predicts={predicts}", "moe.layers=none", *overrides)
    return labelled_config(folder / "train.jsonl", {"name": name, **options}, outputs, *more)


def opened(config: RunConfig) -> tuple[Labelled, list[Any]]:
    objective = resolve_run(config, 1).objective
    assert isinstance(objective, Labelled)
    return objective, objective.open(config.data.sources[0].path)


def batch_of(objective: Labelled, examples: list[Any]) -> Batch:
    return objective.batch([each.item() for each in examples], list(range(len(examples))))


def test_of_a_pair_the_longer_text_is_cut(tmp_path: Path) -> None:
    """As if one token after the other were taken from the longer text, of equal ones the first."""
    sizes = list(product((1, 2, 5, 9), repeat=2))
    rows = [{"text": "x" * a, "second": "y" * b, "label": "A"} for a, b in sizes]
    config = config_of(tmp_path, "classification", rows, "data.sequence_length=11", too_long="truncate")
    for (first, second), example in zip(sizes, opened(config)[1], strict=True):
        assert example.length == first + second + 4
        while first + second + 4 > 11:
            first, second = (first - 1, second) if first >= second else (first, second - 1)
        expected = [END, *b"x" * first, END, END, *b"y" * second, END]
        assert example.tokens_S.tolist() == expected


@pytest.fixture(name="tokenizers", scope="module")
def _tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tokenizers")
    texts = ["Grüße an die Welt, und so weiter 12", "the 103 xy of a hello world"] * 30
    train_bpe(iter(texts), 300, folder / "tokenizer.json")
    train_sentencepiece(iter(texts), 320, folder / "tokenizer.model")
    return ["bytes", str(folder / "tokenizer.json"), str(folder / "tokenizer.model")]


@pytest.mark.parametrize("number", range(3))
def test_tags_stand_at_the_first_tokens_of_words(tmp_path: Path, tokenizers: list[str], number: int) -> None:
    words = ["hello", "日本", "Grüße", ",", "a"]
    rows = [{"words": words, "tags": ["A", "B", "A", "B", "A"]}]
    tokenizer = load_tokenizer(tokenizers[number])
    config = config_of(
        tmp_path, "tagging", rows, f"data.tokenizer={tokenizers[number]}", "data.sequence_length=64"
    )
    (example,) = opened(config)[1]
    ids, text = example.tokens_S.tolist(), " ".join(words)
    assert ids == [tokenizer.eod, *tokenizer.encode(text), tokenizer.eod]
    assert example.labels_P.tolist() == [0, 1, 0, 1, 0]
    bounds = [*example.places_P.tolist(), len(ids) - 1]
    assert bounds == sorted(set(bounds)) and bounds[0] >= 1
    spans = tokenizer.encode_with_spans(text)[1]
    for place, word in zip(example.places_P.tolist(), words, strict=True):
        assert text[spans[place - 1][0] : spans[place - 1][1]].strip()[:1] == word[0]


def test_words_after_the_cut_have_no_label(tmp_path: Path) -> None:
    rows = [{"words": ["abc", "de", "f"], "tags": ["A", "B", "A"]}]
    config = config_of(tmp_path, "tagging", rows, "data.sequence_length=7", too_long="truncate")
    objective, (example,) = opened(config)
    assert example.tokens_S.tolist() == [END, *b"abc d", END] and example.length == 10
    assert (example.places_P.tolist(), example.labels_P.tolist()) == ([1, 5], [0, 1])
    logits_SC = torch.tensor([[0, 1.0], [3, 2], [0, 9], [0, 9], [0, 9], [1, 5], [0, 9]])
    assert objective.prediction(example, logits_SC) == {"tags": ["A", "B", NO_TAG]}
    with pytest.raises(UserError, match="a text has 10 tokens.* raise it, or set train.objective.too_long"):
        opened(config_of(tmp_path, "tagging", rows, "data.sequence_length=7"))


@pytest.mark.parametrize(
    ("words", "places"),
    [
        (["in", "\u200b", "New", "York"], [1, 0, 3, 4]),
        (["\u200b", "\x03", "New"], [0, 0, 2]),
        (["New", "\u200b"], [1, 0]),
        (["\u200b"], [0]),
        (["\u200bNew", "Yo\u200brk"], [1, 2]),
    ],
)
def test_words_that_the_tokenizer_removes_have_no_label(
    tmp_path: Path, words: list[str], places: list[int]
) -> None:
    """What is left of a removed word is a space, which has a token."""
    vocabulary = [(piece, -1.0) for piece in ("</s>", "<unk>", "▁", "▁in", "▁New", "▁York")]
    backend = tokenizers_library.Tokenizer(tokenizers_library.models.Unigram(vocabulary, 1))
    removed = tokenizers_library.Regex("\u200b|\x03")
    backend.normalizer = tokenizers_library.normalizers.Replace(removed, "")
    backend.pre_tokenizer = tokenizers_library.pre_tokenizers.Metaspace()
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "own.json"))
    rows = [{"words": words, "tags": ["AB"[number % 2] for number in range(len(words))]}]
    config = config_of(tmp_path / "run", "tagging", rows, f"data.tokenizer={tmp_path}/own.json")
    objective, (example,) = opened(config)
    own = [number for number, place in enumerate(places) if place]
    assert example.places_P.tolist() == [place for place in places if place]
    assert example.labels_P.tolist() == [number % 2 for number in own]
    logits_SC = torch.zeros(len(example.tokens_S), 2)
    logits_SC[example.places_P, example.labels_P] = 1
    tags = [tag if place else NO_TAG for tag, place in zip(rows[0]["tags"], places, strict=True)]
    assert objective.prediction(example, logits_SC) == {"tags": tags}


def test_a_token_of_two_words_is_of_the_one_that_is_not_removed(tokenizers: list[str]) -> None:
    """SentencePiece counts removed characters to a token beside them; a token may have two words."""
    tokenizer = load_tokenizer(tokenizers[0])
    with (
        patch.object(type(tokenizer), "encode", lambda self, text: [] if text == "-" else [1]),
        patch.object(type(tokenizer), "decode", lambda self, tokens: "x" * len(tokens)),
    ):
        assert first_tokens(["a", "-", "b"], [(0, 1), (1, 5)], tokenizer) == [0, None, 1]
        assert first_tokens(["a", "-"], [(0, 3)], tokenizer) == [0, None]
        assert first_tokens(["a", "b"], [(0, 3)], tokenizer) == [0, None]


def test_an_answer_is_marked_by_its_tokens(tmp_path: Path) -> None:
    """Of bytes: question and context, with the answer inside. A cut that removes it takes its loss."""
    row = {
        "question": "q?",
        "context": "in the year 1066",
        "answers": {"text": ["1066"], "answer_start": [12]},
    }
    objective, (example,) = opened(config_of(tmp_path, "span", [row]))
    assert example.tokens_S.tolist() == [END, *b"q?", END, END, *b"in the year 1066", END]
    assert example.labels_P.tolist() == [5 + 12, 5 + 15] and example.places_P.tolist() == [0, 1]
    objective, (cut,) = opened(
        config_of(tmp_path, "span", [row], "data.sequence_length=20", too_long="truncate")
    )
    assert len(cut.tokens_S) == 20 and not len(cut.labels_P)
    assert batch_of(objective, [cut]).loss_mask_BS.sum() == 0
    with pytest.raises(
        UserError, match="the question has 2 tokens, which leave none.* raise it to at least 7"
    ):
        opened(config_of(tmp_path, "span", [row], "data.sequence_length=6", too_long="truncate"))
    opened(config_of(tmp_path, "span", [row], "data.sequence_length=7", too_long="truncate"))


def test_the_best_span_is_that_of_a_search(tmp_path: Path) -> None:
    """Over all spans inside the context of at most `longest` tokens."""
    rows = answers(0, 9)
    objective, examples = opened(config_of(tmp_path, "span", rows, longest=3))
    generator = torch.Generator().manual_seed(1)
    for row, example in zip(rows, examples, strict=True):
        logits_S2 = torch.randn(len(example.tokens_S) + 2, 2, generator=generator)
        first = len(row["question"]) + 3
        spans = [
            (float(logits_S2[first + a, 0] + logits_S2[first + b, 1]), -a, -b)
            for a, b in product(range(len(row["context"])), repeat=2)
            if 0 <= b - a < 3
        ]
        _, start, last = max(spans)
        assert objective.prediction(example, logits_S2) == {"start": -start, "end": -last + 1}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "overrides"), HEADS)
def test_the_loss_is_that_of_plain_pytorch(tmp_path: Path, name: str, overrides: tuple[str, ...]) -> None:
    """From the hidden states, at the labels' places; with padding, whose ids have no influence."""
    config = config_of(tmp_path, name, ROWS[name], *overrides)
    run = resolve_run(config, 1)
    model = tiny_model(config, vocab_size=run.vocabulary.size)
    assert isinstance(model, Encoder) and isinstance(model.head, LabelHead)
    for parameter in model.head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    objective, examples = opened(config)
    batch = batch_of(objective, examples)
    assert batch.lengths_B is not None and len(set(batch.lengths_B.tolist())) > 2
    inputs: dict[str, Any] = model_inputs(batch)
    smoothing = config.train.label_smoothing
    losses_BS = model(**inputs, label_smoothing=smoothing) * batch.loss_mask_BS
    hidden_SBH = model.hidden(batch.tokens_BS, batch.position_ids_BS, inputs["documents"])
    for row, (example, length) in enumerate(zip(examples, batch.lengths_B.tolist(), strict=True)):
        states_SH = hidden_SBH[:length, row]
        if name in ("regression", "classification"):
            first = config.model.pooling == "first"
            states_SH = states_SH[:1] if first else states_SH.mean(0, keepdim=True)
            if model.head.pooler is not None:
                states_SH = torch.tanh(states_SH @ model.head.pooler.weight.T + model.head.pooler.bias)
        logits_SC = states_SH @ model.head.output.weight.T + model.head.output.bias
        labels_P = torch.from_numpy(example.labels_P)
        if name == "regression":
            expected = functional.mse_loss(logits_SC[:, 0], labels_P, reduction="none")
        elif name == "span":
            expected = functional.cross_entropy(logits_SC.T, labels_P, reduction="none")
        else:
            # PyTorch gives the label itself a part of the smoothed share too: half of it with two labels.
            expected = functional.cross_entropy(
                logits_SC[example.places_P], labels_P, reduction="none", label_smoothing=2 * smoothing
            )
        places = torch.from_numpy(example.places_P)
        torch.testing.assert_close(losses_BS[row, places], expected, rtol=1e-5, atol=1e-6)
        assert losses_BS[row].count_nonzero() <= len(places)
    padding_BS = torch.arange(batch.tokens_BS.shape[1]) >= batch.lengths_B[:, None]
    inputs |= {"tokens_BS": batch.tokens_BS.masked_fill(padding_BS, 65)}
    other = model(**inputs, label_smoothing=smoothing)
    assert torch.equal(other * batch.loss_mask_BS, losses_BS)
    assert sum(each.numel() for each in model.parameters()) == model_size(config, run.vocabulary.size).total
    assert model_flops(config, run.vocabulary.size).token > 0


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["tagging", "span", "regression"])
def test_sums_of_an_evaluation(tmp_path: Path, name: str) -> None:
    """By hand from the logits, over the labels with a loss; padding may have the largest score."""
    objective, examples = opened(config_of(tmp_path, name, ROWS[name]))
    batch = batch_of(objective, examples)
    size = tuple(batch.tokens_BS.shape)
    generator = torch.Generator().manual_seed(2)
    shape = (size[0], 1) if name == "regression" else (*size, 2)
    logits = torch.randn(shape, generator=generator)
    ((key, found),) = objective.evaluation_sums(batch, logits).items()
    expected = 0.0
    for row, example in enumerate(examples):
        for place, label in zip(example.places_P.tolist(), example.labels_P.tolist(), strict=True):
            if name == "regression":
                expected += (float(logits[row, 0]) - label) ** 2
            elif name == "span":
                expected += int(logits[row, :, place].argmax()) == label
            else:
                expected += int(logits[row, place].argmax()) == label
    assert (key, float(found)) == (
        "squared_error" if name == "regression" else "accuracy",
        pytest.approx(expected, rel=1e-5),
    )


@pytest.mark.parametrize("case", cases("finetune", "objective: "))
def test_refusals(tmp_path: Path, case: Case, expect_message: Callable[..., None]) -> None:
    name = case["objective"]
    config = config_of(tmp_path, name, ROWS[name], *case["overrides"])
    expect_message(case, told(lambda: resolve_run(config, 1)))
