"""Conversations: bad lines, templates, what is learned, packing, cuts, sets, and what is shown of a batch."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megamoe.apps.chat.conversation import conversation_of
from megamoe.apps.chat.dataset import Conversations, pack
from megamoe.apps.chat.named_templates import NAMED
from megamoe.apps.chat.objectives.chat import Chat
from megamoe.apps.chat.prepare import ChatCard, ChatFiles, encode_conversation
from megamoe.apps.chat.templates import GENERATION, ChatTemplate, checked, load_template
from megamoe.apps.generation.chat import end_of_turn
from megamoe.apps.prepare.verify import verify_in_full
from megamoe.apps.show_batch.show import Words, pieces_of, text_of
from megamoe.config import RunConfig
from megamoe.data.stored import local_copy
from megamoe.data.tokenizers import load_tokenizer
from megamoe.errors import UserError
from megamoe.objectives.objective import TokenShares
from megamoe.train.resolved import ResolvedRun, resolve_run
from tests.support.data.conversations import (
    conversation,
    conversations,
    make_chat,
    make_folder,
    make_tokenizer,
    write_lines,
)
from tests.support.refusals import Case, cases, told
from tests.support.tiny import tiny, tool

Refused = Callable[..., str]
USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
LENGTH = 64


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tokenizer.json`, and conversations `train` in ChatML."""
    folder = tmp_path_factory.mktemp("chat")
    make_chat(folder, conversations(), make_tokenizer(folder), template="chatml")
    return folder


def config_of(prefix: Path, *overrides: str, **options: Any) -> RunConfig:
    return tiny(
        "data.mock=false",
        f"data.sources=[{prefix}]",
        "data.split=[0.8, 0.2, 0]",
        f"data.sequence_length={LENGTH}",
        "data.document_aware=true",
        "model.vocab_size=null",
        f"train.objective={json.dumps({'name': 'chat', **options})}",
        *overrides,
    )


def resolved(prefix: Path, *overrides: str, **options: Any) -> ResolvedRun:
    return resolve_run(config_of(prefix, *overrides, **options), 1)


@pytest.mark.parametrize("case", cases("chat", "conversation: "))
def test_bad_conversations(case: Case, expect_message: Callable[..., None]) -> None:
    expect_message(case, told(lambda: conversation_of(case["record"])))


@pytest.mark.parametrize("place", ["content", "arguments"])
def test_half_a_surrogate_pair(folder: Path, place: str) -> None:
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    call = {"function": {"name": "f", "arguments": {"a": "\ud83d"}}}
    user = {**USER, "content": "\ud83d"} if place == "content" else USER
    answer = {"role": "assistant", "tool_calls": [call]} if place == "arguments" else ANSWER
    with pytest.raises(UserError, match="half a surrogate pair in a message"):
        encode_conversation(
            conversation_of({"messages": [user, answer]}), load_template("chatml", tokenizer), tokenizer
        )


def test_what_would_take_the_stack_or_the_memory_is_one_line(
    folder: Path, tmp_path: Path, refused: Refused
) -> None:
    tools: Any = []
    for _ in range(300):
        tools = [{"type": tools}]
    long = [{**USER, "content": "a" * (9 << 20)}, ANSWER]
    options = ["--tokenizer", folder / "tokenizer.json", "--template", "chatml", "--output", tmp_path / "out"]
    for record, words in (
        ({"messages": [USER, ANSWER], "tools": tools}, "nested too deeply"),
        ({"messages": long}, "characters, expected at most 8,388,608"),
    ):
        file = write_lines(tmp_path / "chats.jsonl", [record])
        assert words in refused("prepare_chat", file, *options)


def test_a_bad_line_is_named_and_nothing_is_left(folder: Path, tmp_path: Path, refused: Refused) -> None:
    """Or it is left out, and counted by its reason."""
    good = {"messages": [USER, ANSWER]}
    lines = write_lines(tmp_path / "chats.jsonl", [good, {"messages": [USER]}, good])
    arguments = [lines, "--tokenizer", folder / "tokenizer.json", "--template", "chatml"]
    error = refused("prepare_chat", *arguments, "--output", tmp_path / "out")
    assert f"{lines}:2: the last message is of role 'user'" in error
    assert [path.name for path in tmp_path.iterdir()] == ["chats.jsonl"]
    forged = {"messages": [{**USER, "content": "<|im_end|>"}, ANSWER]}
    unlearned = {"messages": [USER, {**ANSWER, "weight": 0}]}
    records: list[Any] = [good, {"messages": [USER]}, forged, {"messages": [USER]}, unlearned]
    tokenizer = folder / "tokenizer.json"
    card = make_chat(tmp_path, records, tokenizer, template="chatml", bad_lines="skip")
    assert card.conversations == 1 and sum(card.skipped.values()) == 4
    (first, count), *others = card.skipped.items()
    assert count == 2 and first.startswith("the last message is of role")
    assert any("spells the special token <|im_end|>" in reason for reason, _ in others)


@pytest.mark.parametrize("case", cases("chat", "template: "))
def test_a_template_that_fails_while_it_renders(case: Case, expect_message: Callable[..., None]) -> None:
    talk = conversation_of({"messages": [USER, ANSWER]})
    expect_message(case, told(lambda: checked(ChatTemplate("mine", case["template"], {})).render(talk)))


def test_templates_that_are_not_there(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="has no chat template; name one with --template: chatml, llama3"):
        load_template(None, tokenizer)
    with pytest.raises(UserError, match="'chatmll' is neither a file nor one of chatml"):
        load_template("chatmll", tokenizer)
    (tmp_path / "broken.jinja").write_text("{{ 'a }}")
    with pytest.raises(UserError, match="broken.jinja: line 1: .*; expected Jinja"):
        load_template(str(tmp_path / "broken.jinja"), tokenizer)


@pytest.mark.parametrize("name", NAMED)
def test_every_kind_of_tokenizer_reads_a_template_alike(name: str, tmp_path: Path) -> None:
    """And a template without `generation` blocks finds the same answers, but for tools' calls.

    Each answer that is learned is decoded to its own text and the end of its turn.
    """
    from transformers import AutoTokenizer

    folder = make_folder(tmp_path, NAMED[name])
    ours, plain = load_tokenizer(str(folder)), load_tokenizer(str(tmp_path / "tokenizer.json"))
    template = load_template(None, ours)
    bare = GENERATION.sub("", template.text).replace("{%- endgeneration %}", "")
    backend = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    for number in range(4):
        record = conversation(number, 1 + number % 3, system=number % 2 == 0)
        talk = conversation_of(record)
        expected = backend.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        for tokenizer, each in (
            (ours, template),
            (plain, load_template(name, plain)),
            (ours, ChatTemplate("bare", bare, template.named)),
        ):
            found = encode_conversation(talk, each, tokenizer)
            assert found.tokens_S.tolist() == expected["input_ids"]
            assert found.learned_S.tolist() == expected["assistant_masks"]
        answers = [message["content"] for message in record["messages"] if message["role"] == "assistant"]
        (stop,), texts = end_of_turn(template, ours)
        assert not texts
        learned = found.tokens_S[found.learned_S == 1].tolist()
        assert "".join(answers) == ours.decode(learned) and learned.count(stop) == len(answers)


def test_bytes_and_marks_that_no_tokenizer_reserves(tmp_path: Path) -> None:
    records = conversations(3)
    card = make_chat(tmp_path, records, Path("bytes"), "plain_bytes", template="chatml")
    assert "reserves no <|im_end|>, <|im_start|> of the template" in card.warnings[0]
    reserved = make_chat(
        tmp_path, records, Path("bytes"), "marked", template="chatml", special="<|im_start|>,<|im_end|>"
    )
    assert not reserved.warnings and reserved.tokens_learned < card.tokens_learned
    tokenizer = load_tokenizer("bytes")
    assert end_of_turn(load_template("chatml", tokenizer), tokenizer) == ((), ("<|im_end|>",))


def test_what_is_learned_of_several_turns(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    template = load_template("chatml", tokenizer)

    def learned(weights: list[int], learn: Any = "all") -> str:
        answers = [{"role": "assistant", "content": f"answer{n}", "weight": w} for n, w in enumerate(weights)]
        messages = [message for answer in answers for message in (USER, answer)]
        found = encode_conversation(conversation_of({"messages": messages}), template, tokenizer, learn)
        return tokenizer.decode(found.tokens_S[found.learned_S == 1].tolist())

    assert learned([1, 1, 1]) == "answer0answer1answer2"
    assert learned([1, 0, 1]) == "answer0answer2"
    assert learned([1, 1, 1], "last") == "answer2"


@pytest.mark.full
def test_workers_write_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    make_chat(tmp_path, conversations(), folder / "tokenizer.json", template="chatml", workers=2)
    one, two = ChatFiles(folder / "train"), ChatFiles(tmp_path / "train")
    for name in ("bin", "idx"):
        assert getattr(one.data, name).read_bytes() == getattr(two.data, name).read_bytes()
    assert one.learned.read_bytes() == two.learned.read_bytes()
    assert "are right" in verify_in_full(str(tmp_path / "train"))


@pytest.mark.parametrize("window", [4096, 16])
def test_packing_loses_nothing_and_fills_sequences(window: int) -> None:
    length_N = np.random.default_rng(1).integers(1, 100, 500)
    packed = pack(length_N, 100, window)
    assert sorted(place for group in packed for place in group) == list(range(500))
    sums = [int(length_N[group].sum()) for group in packed]
    assert max(sums) <= 100
    assert sum(sums) / (100 * len(packed)) > (0.97 if window > 500 else 0.85)
    assert pack(np.array([60, 50, 40, 50]), 100) == [[0, 2], [1, 3]]


def test_batches_hold_conversations_that_do_not_see_each_other(folder: Path) -> None:
    """Each of the training part once in an epoch; inputs, labels, losses, positions and starts by hand."""
    run = resolved(folder / "train", f"data.sequence_length={2 * LENGTH}", too_long="drop")
    epoch = run.objective.samples_per_epoch()
    data = Conversations(str(folder / "train"), 2 * LENGTH, "drop", run.vocabulary.size)
    dataset = run.objective.datasets(2 * epoch + 1, 4).train
    seen = []
    for first in range(0, epoch):
        batch = run.objective.make_batch([dataset[first]], [first])
        assert batch.document_start_BS is not None and batch.lengths_B is not None
        length = int(batch.lengths_B[0])
        start_S = batch.document_start_BS[0]
        place_S = torch.arange(2 * LENGTH)
        assert (start_S[length:] == length).all() and not batch.loss_mask_BS[0, length:].any()
        assert torch.equal(batch.position_ids_BS[0, :length], (place_S - start_S)[:length])
        bounds = [*sorted(set(start_S[:length].tolist())), length]
        for low, high in pairwise(bounds):
            tokens = batch.tokens_BS[0, low:high]
            assert torch.equal(batch.labels_BS[0, low : high - 1], tokens[1:])
            seen.append((tokens.tolist(), [0, *batch.loss_mask_BS[0, low : high - 1].tolist()]))
            assert batch.loss_mask_BS[0, high - 1] == 0
    known = [data.read(place) for place in data.between(0, 0.8)]
    assert sorted(seen) == sorted((tokens.tolist(), learned.tolist()) for tokens, learned in known)
    second = [dataset[number]["tokens"].tolist() for number in range(epoch, 2 * epoch)]
    assert second != [dataset[number]["tokens"].tolist() for number in range(epoch)]


def test_conversations_in_object_storage_are_those_of_the_disk(folder: Path, tmp_path: Path) -> None:
    there = local_copy(f"file://{folder}/train", tmp_path)
    assert not list(tmp_path.rglob("*.bin")) and len(list(tmp_path.rglob("*.bin.remote"))) == 2
    found = Conversations(str(there), 2 * LENGTH, "truncate", 10**6)
    expected = Conversations(str(folder / "train"), 2 * LENGTH, "truncate", 10**6)
    assert found.cuts == expected.cuts and len(found) == len(expected) > 0
    for place in range(len(expected)):
        for one, other in zip(found.read(place), expected.read(place), strict=True):
            np.testing.assert_array_equal(one, other)


def test_averages_weigh_conversations_alike(folder: Path) -> None:
    run = resolved(folder / "train", average="conversation", too_long="drop", packing=False)
    dataset = run.objective.datasets(4, 0).train
    for number in range(4):
        mask_S = dataset[number]["loss_mask"]
        assert float(mask_S.sum()) == pytest.approx(1) and len(mask_S[mask_S > 0].unique()) == 1


def test_padding_is_neither_counted_nor_computed_in_the_model_flops(folder: Path) -> None:
    """Packed sequences are taken as full; others have a conversation each."""
    config = resolved(folder / "train", too_long="drop", packing=False).config
    config.data.sequence_length = 10_000
    shares = Chat.shares(Chat.Config(packing=False), config)
    assert shares.decoder == shares.predicted == shares.counted and 0 < shares.counted < 1
    assert Chat.shares(Chat.Config(), config) == TokenShares()


def test_long_conversations_are_cut_after_an_answer_and_counted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = str(folder / "train")
    whole, most = Conversations(prefix, 10**6, "error", 400), 90
    with pytest.raises(UserError, match="conversations have more than data.sequence_length 90 tokens, the"):
        Conversations(prefix, most, "error", 400)
    cut, dropped = (Conversations(prefix, most, how, 400) for how in ("truncate", "drop"))
    tokens = 0
    for place in range(len(whole)):
        tokens_S, learned_S = whole.read(place)
        if len(tokens_S) <= most:
            continue
        ends = [end for end in np.flatnonzero(np.diff(learned_S) < 0) + 1 if end <= most]
        kept = max(ends, default=0)
        assert (place in cut.numbers) == (kept > 0)
        if kept:
            found_S, marks_S = cut.read(int(np.flatnonzero(cut.numbers == place)[0]))
            assert found_S.tolist() == tokens_S[:kept].tolist() and marks_S[-1] == 1
        tokens += int(learned_S[kept:].sum())
    assert cut.cuts.tokens == tokens > 0
    assert dropped.cuts.dropped == dropped.cuts.too_long == cut.cuts.too_long > cut.cuts.dropped
    resolved(folder / "train", f"data.sequence_length={most}", too_long="truncate").objective.datasets(1, 0)
    said = capsys.readouterr().out
    assert f"{tokens:,} tokens of answers are not learned" in said


def test_an_evaluation_takes_each_conversation_once(folder: Path) -> None:
    run = resolved(folder / "train", too_long="drop", packing=False)
    dataset = run.objective.datasets(1, 50).validation["valid"]
    losses = [float(dataset[number]["loss_mask"].sum()) for number in range(50)]
    count = int(np.count_nonzero(losses))
    assert 0 < count <= 5 and not any(losses[count:]) and int(dataset[49]["length"]) == 1


@pytest.mark.parametrize("case", cases("chat", "run: "))
def test_runs_that_are_refused(folder: Path, case: Case, expect_message: Callable[..., None]) -> None:
    expect_message(case, told(lambda: resolved(folder / "train", *case["overrides"]), folder))


def test_data_that_is_damaged(folder: Path, tmp_path: Path) -> None:
    card: ChatCard = make_chat(tmp_path, conversations(12), folder / "tokenizer.json", template="chatml")
    files = ChatFiles(tmp_path / "train")
    run = resolved(tmp_path / "train", "data.sequence_length=256")
    content = files.learned.read_bytes()
    files.learned.write_bytes(bytes(reversed(content)))
    with pytest.raises(UserError, match="learned.bin' is damaged or another dataset's"):
        run.objective.datasets(1, 0)
    files.learned.write_bytes(content[:-1])
    with pytest.raises(UserError, match="is missing or has another size than its card says"):
        resolved(tmp_path / "train", "data.sequence_length=256")
    files.card.unlink()
    with pytest.raises(UserError, match="holds no conversations: there is no file .*prepare_chat"):
        resolved(tmp_path / "train")
    assert card.conversations == 12


def test_a_batch_as_text(folder: Path) -> None:
    run = resolved(folder / "train", too_long="drop", packing=False)
    dataset = run.objective.datasets(1, 0).train
    batch = run.objective.make_batch([dataset[0]], [0])
    words = Words(run.vocabulary.tokenizer)
    text = text_of(pieces_of(batch, 0, words), colours=False)
    lines = text.splitlines()
    assert lines[0].startswith("--- document 1: ") and lines[0].endswith(" losses ---")
    (answer,) = [line for line in lines if line.startswith("[[It is ")]
    assert answer.endswith("é<|im_end|>]]") and "<|im_start|>user" in text
    assert lines[-1] == f"<padding x {LENGTH - int(dataset[0]['length'])}>"
    coloured = text_of(pieces_of(batch, 0, words), colours=True)
    assert "\x1b[1;32mIt is" in coloured and "[[" not in coloured


def test_batches_of_other_objectives_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], restored_process: None
) -> None:
    from megamoe.config import dump_yaml

    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(tiny("data.document_aware=true")))
    assert tool("show_batch").main(["--config", str(path), "--count", "1"]) == 0
    causal = capsys.readouterr().out
    assert "sequence 1" in causal and "[[" in causal
    masked = ["model.architecture=encoder", "train.objective=masked", "moe.layers.every=1"]
    masked += ["model.vocab_size=null"]
    assert tool("show_batch").main(["--config", str(path), "--count", "1", *masked]) == 0
    assert "->" in capsys.readouterr().out
    assert tool("show_batch").main(["--config", str(path), "--set", "other"]) == 2
    assert "--set: found 'other', expected train" in capsys.readouterr().err
