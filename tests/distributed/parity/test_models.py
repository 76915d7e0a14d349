"""Variants of the model train at every layout as on one rank; encoders and encoder-decoders with padding.

What today's open models have moves between layouts; runs of the other architectures resume exactly.
"""

from pathlib import Path
from typing import Any

import pytest

from megamoe.data.batches import Item
from megamoe.registry import register
from megamoe.zoo.objectives.span_corruption import SpanCorruption
from tests.support.checkpoint_files import assert_same_bits, read_tensors
from tests.support.data.pairs import make_pairs
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import WORDS, Place, assert_as_alone, run_each

STEPS = 2
SIZES: dict[str, Any] = {
    "model__num_attention_heads": 4,
    "train__micro_batch_size": 2,
    "train__global_batch_size": 8,
}
# Granite: factors everywhere, and shared experts of a size of their own; a bound on the logits beside them.
GRANITE: dict[str, Any] = {
    "model__residual_scale": 0.4,
    "model__embedding_scale": 6.0,
    "model__logit_scale": 0.25,
    "model__logit_soft_cap": 5.0,
    "model__bias": True,
    "model__tie_embeddings": False,
    "moe__num_shared_experts": 1,
    "moe__shared_expert_mode": "gated",
    "moe__shared_expert_ffn_hidden_size": 24,
    "moe__router": {
        "scorer": {"name": "linear", "bias": True},
        "selector": {"name": "top_k", "k": 2, "weights": "kept_softmax"},
    },
}
# gpt-oss: biases of the experts, which are cut like their weights, and its activation in dense blocks too.
GPT_OSS: dict[str, Any] = {
    "model__activation": "swiglu_clamped",
    "moe__expert_bias": True,
    "moe__num_shared_experts": 0,
    "moe__expert_activation_dropout": 0.1,
    "moe__router": GRANITE["moe__router"],
    "optimizer__weight_decay": 0.1,
}
# DeepSeek-V3's multi-token prediction, over packed documents; its blocks are MoE like the last one.
AHEAD: dict[str, Any] = {
    "model__multi_token_prediction": {"depth": 2, "weight": 0.5},
    "model__hidden_size": 32,
    "train__label_smoothing": 0.1,
    "moe__weights_in_activation": True,
    "moe__router": {
        "scorer": {"name": "linear", "jitter": 0.1},
        "score_function": {"name": "sigmoid", "bias_update": 0.01},
        "selector": {"name": "top_k", "k": 2, "scale": 2.5},
    },
}
# Nemotron 3: experts in a latent space, with biases and dropout, which count its columns; beside them experts
# without computation of all kinds, as in MoE++.
LATENT: dict[str, Any] = {
    "moe__zero_experts": {"identity": 2, "zero": 1, "constant": 2},
    "moe__losses": {"heterogeneous_balance": 0.05},
    "moe__latent_size": 8,
    "moe__num_shared_experts": 1,
    "moe__expert_bias": True,
    "moe__expert_output_dropout": 0.1,
    "moe__router": {
        "scorer": {"name": "linear", "jitter": 0.1},
        "score_function": {"name": "sigmoid", "bias_update": 0.01, "mean_experts": 2.0},
        "selector": {"name": "top_k", "k": 3},
    },
}
OPEN: dict[str, dict[str, Any]] = {"granite": GRANITE, "gpt_oss": GPT_OSS, "ahead": AHEAD, "latent": LATENT}
DROPOUT = {"moe__expert_output_dropout": 0.3, "moe__expert_activation_dropout": 0.2}
BLOCKS: dict[str, dict[str, Any]] = {
    "inserted sub-layers": {
        "moe__layers": {"insert_after": [1]},
        "moe__num_shared_experts": 0,
        "moe__expert_sublayers": 2,
        **DROPOUT,
    },
    "residual, sub-layers in place": {
        "moe__layers": {"at": [1, 2]},
        "moe__shared_expert_mode": "residual",
        "moe__expert_sublayers": 2,
        "model__norm": "layernorm",
        **DROPOUT,
    },
    "small start": {"model__init_scale": 0.1, "moe__layers": {"at": [2], "insert_after": [1]}},
}
# Initial weights, factors and rates are those of the width.
MUP: dict[str, Any] = {
    "model__mup": {"base": 16, "base_head_size": 8, "base_layers": 1},
    "optimizer__lr": 1e-2,
    "optimizer__eps": 1e-3,
}
DECODERS = OPEN | BLOCKS
DECODERS |= {
    f"muP, {kind}, {'tied' if tied else 'untied'}": {
        **MUP,
        "optimizer__name": kind,
        "model__tie_embeddings": tied,
    }
    for kind in ("adamw", "muon")
    for tied in (True, False)
}


class Ragged(SpanCorruption):
    """Pairs of other lengths in each sample, so that micro batches have padding on both sides."""

    def sample(self, item: Item, place: str) -> Item:
        pair, draws = super().sample(item, place), self.draws(f"{place}/lengths")
        return {side: tokens[: int(draws.integers(1, len(tokens) + 1))] for side, tokens in pair.items()}


def with_ragged_pairs() -> None:
    """Register the objective in a rank's process; the tests' own process need not know it."""
    register("objective", "ragged")(Ragged)


OTHERS: dict[str, dict[str, Any]] = {
    "encoder": {
        "model__architecture": "encoder",
        "data__sequence_length": 36,
        "model__norm_position": "post",
        "model__position": "learned",
        "model__norm": "layernorm",
        "model__head_transform": True,
        "model__attention": {"query_key_norm": "head", "input_bias": True, "scale": 0.5},
        "train__objective": {"name": "masked", "unit": "span"},
        "moe__layers": {"at": [2], "insert_after": [1]},
    },
    "encoder_decoder": {
        "model__architecture": "encoder_decoder",
        "data__sequence_length": 36,
        "model__position": "sinusoidal",
        "model__scale_embeddings": True,
        "model__bias": True,
        "model__head_size": 6,
        "model__attention": {"query_key_norm": "whole", "input_bias": False},
        "model__activation": "relu",
        "data__document_aware": False,
        "train__objective": {"name": "ragged", "mean_span": 2.0},
        "train__label_smoothing": 0.1,
        "moe__layers": {"encoder": {"at": [2]}, "decoder": {"at": [1], "insert_after": [2]}},
        "moe__router": {
            "scorer": {"name": "linear", "jitter": 0.1},
            "selector": {"name": "top_k", "k": 2},
            "capacity": {"name": "per_expert", "factor": 1.0},
        },
    },
}


TRANSLATION: dict[str, Any] = {
    **OTHERS["encoder_decoder"],
    "model__vocab_size": None,
    "moe__num_shared_experts": 0,
    "data__mock": False,
    "data__split": [0.8, 0.2, 0],
    "data__sampling_exponent": 0.5,
    "data__sequence_length": 40,
    "train__objective": {"name": "translation", "bucket": 4, "direction": "both"},
}
LAYOUTS = [
    Place(4, tensor=2, expert=2, expert_tensor=2, zero=1, sequence=True, recompute="full"),
    Place(2, tensor=2),
    Place(2, expert=2, zero=3),
    Place(4, expert=2, expert_tensor=2, zero=2, recompute="selective"),
    Place(4, tensor=2, expert=2, zero=3, sequence=True),
]
LAYOUTS_OF_OTHERS = [
    Place(4, tensor=2, expert=2, sequence=True, recompute="full"),
    Place(4, expert=2, zero=3),
    Place(2, expert=2),
    Place(4, tensor=2, expert=2, recompute="selective"),
    Place(4, zero=1),
    Place(4, expert=4, zero=3, recompute="full"),
    Place(4, tensor=2, expert=2, zero=1),
]
# Models and their places, in one world. Attention to the encoder is cut by tensor parallelism too.
TWO_RANKS = Place(2, expert=2, zero=1, recompute="full")
QUICK = [
    [
        *((name, TWO_RANKS) for name in BLOCKS),
        *((name, Place(2, expert=2, zero=1)) for name in ("encoder", "translation")),
    ],
    [("encoder_decoder", LAYOUTS_OF_OTHERS[0])],
]
# Experts of sub-layers cannot be cut.
FULL = [
    [(n, p) for n in DECODERS if p.expert_tensor == 1 or "moe__expert_sublayers" not in DECODERS[n]]
    for p in LAYOUTS
] + [[(name, place) for name in (*OTHERS, "translation")] for place in LAYOUTS_OF_OTHERS]
Models = dict[str, dict[str, Any]]
ALONE: Models = {}  # what one rank showed of a model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    sources = [{"path": str(make_pairs(tmp_path_factory.mktemp("pairs"), [0.8, 0.2, 0]) / "train")}]
    models = {**DECODERS, **OTHERS, "translation": {**TRANSLATION, "data__sources": sources}}
    return {name: {**SIZES, **model} for name, model in models.items()}


def ragged_runs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Job: `run_each`, for runs that may have the objective."""
    with_ragged_pairs()
    return run_each(runs)


def trained(
    pool: Pool, models: Models, cases: list[tuple[str, Place]], folder: Path
) -> list[list[dict[str, Any]]]:
    """Return what each rank showed of each model at its place; all places have as many ranks."""
    runs = [{"steps": STEPS, **models[name], **place.changes(folder)} for name, place in cases]
    ranks = pool.run(ragged_runs, runs, ranks=cases[0][1].ranks, timeout_s=600)
    return [list(found) for found in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    "cases",
    [*QUICK, *(pytest.param(cases, marks=pytest.mark.full) for cases in FULL)],
    ids=lambda cases: f"{cases[0][0]}, {cases[0][1]}",
)
def test_a_layout_trains_as_one_rank(
    pool: Pool, models: Models, tmp_path: Path, cases: list[tuple[str, Place]]
) -> None:
    if missing := [name for name, _ in cases if name not in ALONE]:
        alone = trained(pool, models, [(name, Place()) for name in missing], tmp_path)
        ALONE.update(zip(missing, (shown for (shown,) in alone), strict=True))
    for (name, _), found in zip(cases, trained(pool, models, cases, tmp_path), strict=True):
        losses = ALONE[name]["lm_loss"]
        if name == "translation":
            assert len({sum(masks) for masks in ALONE[name]["masks"]}) > 1  # unequal lengths
        else:
            assert losses[-1] < losses[0], name
        assert_as_alone(found, ALONE[name], name)


def test_a_collective_of_a_loss_is_recomputed_in_its_order(pool: Pool, tmp_path: Path) -> None:
    """The loss is of all ranks' tokens."""
    losses = {"moe__losses": {"switch_balance": {"weight": 0.1, "scope": "global_batch"}}}
    run = {"steps": STEPS, **BLOCKS["inserted sub-layers"], **TWO_RANKS.changes(tmp_path), **losses}
    several = [{**run, "model__recompute": recompute} for recompute in ("none", "selective", "full")]
    none, *again = pool.run(run_each, several, ranks=2)[0]
    for found in again:
        assert_as_alone([found], none)


@pytest.mark.full
@pytest.mark.parametrize("name", OPEN)
def test_checkpoints_move_between_layouts(pool: Pool, models: Models, tmp_path: Path, name: str) -> None:
    """From every layout to one rank and to TP 2 x EP 2, with the same steps afterwards."""
    model = {**models[name], "train__steps": 4}
    for number, layout in enumerate(LAYOUTS):
        first = {**model, **layout.changes(tmp_path), "output": tmp_path / str(number)}
        whole = {**first, "steps": 4, "name": "whole"}
        pool_of = {"ranks": layout.ranks, "timeout_s": 300}
        expected, _ = pool.run(run_each, [whole, {**first, "steps": 2, "save": True}], **pool_of)[0]
        saved = str(tmp_path / str(number) / "small/checkpoints/step_00000002")
        for target in (Place(), LAYOUTS[0], LAYOUTS[2]):
            further = {**model, **target.changes(tmp_path), "checkpoint__resume": saved, "steps": 2}
            (found,) = pool.run(run_each, [further], ranks=target.ranks, timeout_s=300)[0]
            for word in WORDS:
                after = pytest.approx(expected[word][2:], rel=1e-5)
                assert found[word] == after, f"{layout} -> {target}: {word}"


@pytest.mark.full
@pytest.mark.parametrize("name", [*OTHERS, "translation"])
def test_resume_is_exact_and_checkpoints_move(pool: Pool, models: Models, tmp_path: Path, name: str) -> None:
    """Bit for bit at the same layout, with dropout; to 1e-5 on one rank, from ZeRO 3 on two."""
    model = {**models[name], "train__steps": 4, "data__workers": 1}
    two = {**model, **Place(2, expert=2, zero=3).changes(tmp_path), "model__hidden_dropout": 0.1}
    auto = {"checkpoint__resume": "auto", "save": True}
    whole = {**two, "steps": 4, "output": tmp_path / "whole", "save": True}
    cut = {**two, **auto, "steps": 2, "output": tmp_path / "cut"}
    begun = pool.run(ragged_runs, [whole, cut], ranks=2, timeout_s=300)
    ended = pool.run(ragged_runs, [cut], ranks=2, timeout_s=300)
    for (together, first), (second,) in zip(begun, ended, strict=True):
        for word in (*WORDS, "samples"):
            assert first[word] + second[word] == together[word], word
    last = "small/checkpoints/step_00000004"
    assert_same_bits(*(read_tensors(tmp_path / kind / last) for kind in ("whole", "cut")))
    saved = str(tmp_path / "cut/small/checkpoints/step_00000002")
    further = {"checkpoint__resume": saved, "steps": 2, "model__hidden_dropout": 0.0}
    run = {**model, **further, "output": tmp_path / "moved"}
    (moved,) = pool.run(ragged_runs, [run], ranks=1, timeout_s=300)
    run |= {**Place(2, tensor=2, expert=2, sequence=True).changes(tmp_path), "output": tmp_path / "other"}
    (other, _) = pool.run(ragged_runs, [run], ranks=2, timeout_s=300)
    for word in ("lm_loss", "grad_norm"):
        assert other[0][word] == pytest.approx(moved[0][word], rel=1e-5), word
