"""Generation: the cache against the plain forward pass, at any layout; prompts of different lengths."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import torch
from torch import Tensor

from megamoe.apps.evaluation.trained_model import Session, TrainedModel, session
from megamoe.apps.generation.generate import Generated, encoded, generate, text_of
from megamoe.apps.generation.runner import Runner, leave_capacity_out
from megamoe.apps.generation.sampling import Sampling
from megamoe.data.special import SpecialTokens
from megamoe.data.tokenizers import ByteTokenizer, load_tokenizer
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError
from megamoe.moe.context import MicroBatch
from tests.support.apps.tiny_model import opened
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import trained_on_bytes

ROTARY = {
    "model__num_attention_heads": 4,
    "model__num_query_groups": 2,
    "model__attention": {"query_key_norm": "head", "window": 4, "window_blocks": [2], "sinks": True},
    "moe__router": {"selector": {"name": "threshold", "threshold": 0.4}},
}
LEARNED = {
    "model__position": "learned",
    "model__norm": "layernorm",
    "model__attention": {"window": 5, "soft_cap": 3.0, "output_bias": True},
    "moe__router": {
        "selector": {"name": "top_k", "k": 2},
        "capacity": {"name": "per_expert", "factor": 0.25},
    },
}
CHOOSING = {
    "moe__router": {"selector": {"name": "expert_choice", "allow_non_causal": True}},
    "moe__losses": {},
}
PROMPTS = ["a cat", "the quick brown", "o", "the quick brown"]
LAYOUTS = [
    ["parallel.expert=2"],
    ["parallel.tensor=2"],
    ["parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2"],
]


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("generated")
    models: dict[str, dict[str, Any]] = {"rotary": ROTARY, "learned": LEARNED, "choosing": CHOOSING}
    pool.run(trained_on_bytes, folder, models, ranks=1)
    return folder


def plainly(trained: TrainedModel, tokens: list[int]) -> Tensor:
    """The oracle: the logits after these tokens, from one forward pass over them and nothing else."""
    tokens_BS = torch.tensor([tokens])
    trained.context.batch = MicroBatch()
    with torch.no_grad():
        logits_BSV = trained.decoder.whole_logits(tokens_BS, torch.arange(len(tokens))[None])
    return logits_BSV[0, -1, : trained.vocabulary.size]


def differences(ranks: Session, path: Path) -> list[float]:
    """How far the cached logits of a batch of prompts are from the oracle's, at each place."""
    found = []
    trained = ranks.open(path)
    leave_capacity_out(trained)
    prompts = encoded(trained, PROMPTS[:3], 6)
    runner = Runner(trained, prompts, 6)
    logits_BV = runner.begin()
    sequences = [list(prompt) for prompt in prompts]
    for _ in range(5):
        wanted_BV = torch.stack([plainly(trained, tokens) for tokens in sequences])
        found.append(float((logits_BV - wanted_BV).abs().max()))
        new = wanted_BV.argmax(1).tolist()
        for tokens, token in zip(sequences, new, strict=True):
            tokens.append(token)
        logits_BV = runner.feed(new)
    return found


def generated(
    ranks: Session, path: Path, batches: list[int], overrides: list[str], **options: Any
) -> list[list[Generated]]:
    """Results of all prompts for each batch size."""
    trained = ranks.open(path, overrides)
    leave_capacity_out(trained)
    shows = options.pop("show_experts", False)
    sampling = Sampling(max_tokens=6, **options)
    prompts = encoded(trained, PROMPTS, sampling.max_tokens)
    return [
        list(generate(trained, prompts, sampling, batch_size=size, show_experts=shows)) for size in batches
    ]


def greedily(ranks: Session, folder: Path, overrides: list[str]) -> list[Generated]:
    """Greedy results of both models, with the experts."""
    found: list[Generated] = []
    for name in ("rotary", "learned"):
        found += generated(ranks, folder / name, [3], overrides, temperature=0.0, show_experts=True)[0]
    return found


def on_one_rank(folder: Path) -> dict[str, Any]:
    """Job: everything that one rank can find."""
    rotary, learned = folder / "rotary", folder / "learned"
    with session() as ranks:
        return {
            "rotary": differences(ranks, rotary),
            "learned": differences(ranks, learned),
            "drawn": generated(ranks, rotary, [4, 2, 1], [], top_k=50, top_p=0.9, show_experts=True),
            "other seed": generated(ranks, rotary, [4], [], seed=7),
            "greedy": greedily(ranks, folder, []),
            "notes": leave_capacity_out(ranks.open(learned)),
            "refused": refusals(ranks, folder),
        }


def refusals(ranks: Session, folder: Path) -> list[str]:
    """The lines of what is refused."""
    lines = []
    for prompts, tokens, overrides in (
        ([""], 4, []),
        (["a", "b" * 20], 20, []),
        (["a"], 4, ["data.tokenizer=null", "model.vocab_size=257"]),
    ):
        try:
            encoded(ranks.open(folder / "learned", overrides), prompts, tokens)
        except UserError as error:
            lines.append(str(error))
    for name in ("choosing", "learned"):  # a selector over all tokens, and a capacity
        with pytest.raises(UserError) as caught:
            next(generate(ranks.open(folder / name), [[1]], Sampling(max_tokens=1)))
        lines.append(str(caught.value))
    return lines


@pytest.fixture(scope="module")
def alone(pool: Pool, runs: Path) -> dict[str, Any]:
    (found,) = pool.run(on_one_rank, runs, ranks=1)
    return found


@pytest.mark.parametrize("name", ["rotary", "learned"])
def test_the_cache_gives_the_logits_of_a_plain_pass(alone: dict[str, Any], name: str) -> None:
    assert len(alone[name]) == 5 and max(alone[name]) < 1e-5


def texts(results: list[Generated]) -> list[tuple[list[int], str, str]]:
    return [(result.tokens, result.text, result.reason) for result in results]


def test_draws_do_not_depend_on_the_batch(alone: dict[str, Any]) -> None:
    whole, halves, single = map(texts, alone["drawn"])
    assert whole == halves == single
    assert whole[1] != whole[3]  # the same prompt twice has two draws
    assert whole != texts(alone["other seed"][0])


def test_experts_are_shown_for_every_token(alone: dict[str, Any]) -> None:
    whole, _, single = alone["drawn"]
    for one, other in zip(whole, single, strict=True):
        assert len(one.experts) == len(one.prompt) + len(one.tokens) == len(other.experts)
        for mine, theirs in zip(one.experts, other.experts, strict=True):
            assert mine.keys() == theirs.keys() == {"2"}
            assert [expert for expert, _ in mine["2"]] == [expert for expert, _ in theirs["2"]]
            assert [w for _, w in mine["2"]] == pytest.approx([w for _, w in theirs["2"]], abs=1e-5)
            assert sum(weight for _, weight in mine["2"]) >= 0.4 - 1e-6  # the threshold
    greedy = alone["greedy"][len(PROMPTS) :]
    assert all(len(token["2"]) == 2 for result in greedy for token in result.experts)
    (told,) = alone["notes"]
    assert told.startswith("moe.router.capacity per_expert would drop pairs by the other tokens of a batch")


def test_mistakes_are_lines(alone: dict[str, Any]) -> None:
    empty, long, unknown, choosing, dropping = alone["refused"]
    assert "the selector expert_choice lets a token's experts depend on other tokens; override" in choosing
    assert "moe.router.capacity per_expert drops pairs by all tokens of a sequence; override" in dropping
    assert empty == "prompt 1 is empty; expected at least one token"
    assert long.startswith("prompt 2 has 20 tokens, with --max-tokens 20 40, but the model has learned")
    assert "/step_00000001: the tokenizer is unknown" in unknown


def on_two_ranks(folder: Path) -> list[list[Generated]]:
    """Job: greedy results at each layout."""
    with session() as ranks:
        return [greedily(ranks, folder, overrides) for overrides in LAYOUTS]


def chosen(results: list[Generated]) -> list[list[list[int]]]:
    return [[[expert for expert, _ in token["2"]] for token in result.experts] for result in results]


@pytest.mark.full
def test_two_ranks_generate_what_one_does(pool: Pool, runs: Path, alone: dict[str, Any]) -> None:
    for found in pool.run(on_two_ranks, runs, ranks=2):
        for results in found:
            assert texts(results) == texts(alone["greedy"])
            assert chosen(results) == chosen(alone["greedy"])


def greedy(trained: TrainedModel, *stop: str, special: dict[str, int] | None = None) -> Generated:
    tokenizer = ByteTokenizer()
    tokenizer.special = SpecialTokens(special or {})
    words = Vocabulary(trained.vocabulary.size, None, tokenizer, tokenizer.special)
    sampling = Sampling(max_tokens=12, temperature=0.0, stop=stop)
    (found,) = generate(dataclasses.replace(trained, vocabulary=words), [[7, 9]], sampling)
    return found


def test_a_text_behind_its_prompt_keeps_the_space_between_them(tmp_path: Path) -> None:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three four", "five six seven eight"] * 20),
        model_prefix=str(tmp_path / "sp"),
        vocab_size=23,
        minloglevel=2,
    )
    tokenizer = load_tokenizer(str(tmp_path / "sp.model"))
    prompt, whole = tokenizer.encode("one two"), tokenizer.encode("one two three")
    assert whole[: len(prompt)] == prompt
    trained: Any = SimpleNamespace(vocabulary=SimpleNamespace(tokenizer=tokenizer))
    assert text_of(trained, prompt, whole[len(prompt) :], joined=True) == " three"
    assert text_of(trained, prompt, whole[len(prompt) :], joined=False) == "three"


def test_a_model_that_gives_nan_generates_nothing(one_rank: None) -> None:
    trained = opened()
    with torch.no_grad():
        next(iter(trained.model.parameters())).fill_(float("nan"))
    with pytest.raises(UserError, match="logits are not finite"):
        greedy(trained)


def until_first(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1]


def test_a_stop_text_that_is_a_special_token_ends(one_rank: None) -> None:
    """Decoded text does not have it."""
    trained = opened()
    free = greedy(trained)
    end = free.tokens[5]
    assert free.reason == "length" and until_first(free.tokens, end) != free.tokens
    for stop in ("<|end|>", "<|end|>\n"):
        found = greedy(trained, "never", stop, special={"<|end|>": end})
        assert (found.tokens, found.reason) == (until_first(free.tokens, end), "end_of_turn")


def test_an_imported_model_ends_at_all_tokens_of_its_folder(one_rank: None, tmp_path: Path) -> None:
    """Also where one of them is the padding, and in a run that started from the import."""
    trained = opened()
    free = greedy(trained).tokens
    end, other = free[5], max(free) + 1
    ended = until_first(free, end)
    (tmp_path / "hf").mkdir()
    imported = tmp_path / "checkpoints/step_00000000"
    started: Any = {"config": {"checkpoint": {"init": {"path": str(imported)}}}}
    models = (
        dataclasses.replace(trained, path=imported),
        dataclasses.replace(trained, meta=trained.meta | started),
    )

    def write(name: str, ids: Any) -> None:
        (tmp_path / "hf" / name).write_text(json.dumps({"eos_token_id": ids}))

    for name, ids, expected in (
        ("config.json", end, ended),
        ("config.json", None, free),
        ("generation_config.json", [other, end], ended),
    ):
        write(name, ids)
        assert [greedy(model).tokens for model in models] == [expected] * 2
    assert greedy(models[0], special={"<pad>": end}).tokens == ended  # no model writes other padding
    write("generation_config.json", ["a"])
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id: found \['a'\], expected ids"):
        greedy(models[0])
    (tmp_path / "hf/generation_config.json").write_text("[")
    with pytest.raises(UserError, match="generation_config.json: .*; expected the JSON file of the import"):
        greedy(models[0])


@pytest.mark.parametrize("temperature", [0.0, 5.0])
@pytest.mark.parametrize("in_data", [2, 24])  # 2: mock data, which have any id
def test_tokens_without_text_are_never_written(one_rank: None, temperature: float, in_data: int) -> None:
    """The mark of a conversation is; the tokenizer has half of the model's ids."""
    special = SpecialTokens({"<pad>": 1, "<|mark|>": 2, "<mask>": 3, "<extra_id_0>": 4, "<2de>": 5})
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = 24
    trained = opened()
    words = Vocabulary(trained.vocabulary.size, 0, tokenizer, special, in_data=in_data)
    found = generate(
        dataclasses.replace(trained, vocabulary=words),
        [[7, number] for number in range(8, 20)],
        Sampling(max_tokens=20, temperature=temperature),
    )
    drawn = {token for result in found for token in result.tokens}
    assert drawn <= {0, 2, *range(6, 24)}
    assert temperature == 0 or 2 in drawn
