"""Variants of the model train at every layout as on one rank; what today's open models have moves too."""

from pathlib import Path
from typing import Any

import pytest

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
MODELS = OPEN | BLOCKS
MODELS |= {
    f"muP, {kind}, {'tied' if tied else 'untied'}": {
        **MUP,
        "optimizer__name": kind,
        "model__tie_embeddings": tied,
    }
    for kind in ("adamw", "muon")
    for tied in (True, False)
}

LAYOUTS = [
    Place(4, tensor=2, expert=2, expert_tensor=2, zero=1, sequence=True, recompute="full"),
    Place(2, tensor=2),
    Place(2, expert=2, zero=3),
    Place(4, expert=2, expert_tensor=2, zero=2, recompute="selective"),
    Place(4, tensor=2, expert=2, zero=3, sequence=True),
]
QUICK = Place(2, expert=2, zero=1, recompute="full")
Models = dict[str, dict[str, Any]]


def assert_trained_as_alone(pool: Pool, models: Models, place: Place, alone: Models, folder: Path) -> None:
    """Check that the ranks of `place` show what one rank showed (`alone`) of each model."""
    ranks = trained(pool, models, place, folder)
    for name in models:
        assert_as_alone([shown[name] for shown in ranks], alone[name], name)


def trained(pool: Pool, models: Models, place: Place, folder: Path) -> list[Models]:
    """Return what the steps of each model showed, by rank."""
    runs = [{"steps": STEPS, **SIZES, **model, **place.changes(folder)} for model in models.values()]
    found = pool.run(run_each, runs, ranks=place.ranks, timeout_s=600)
    return [dict(zip(models, shown, strict=True)) for shown in found]


def test_blocks_train_as_on_one_rank(pool: Pool, tmp_path: Path) -> None:
    (alone,) = trained(pool, BLOCKS, Place(), tmp_path)
    assert_trained_as_alone(pool, BLOCKS, QUICK, alone, tmp_path)


def test_a_collective_of_a_loss_is_recomputed_in_its_order(pool: Pool, tmp_path: Path) -> None:
    """The loss is of all ranks' tokens."""
    losses = {"switch_balance": {"weight": 0.1, "scope": "global_batch"}}
    run = {"steps": STEPS, **BLOCKS["inserted sub-layers"], **QUICK.changes(tmp_path), "moe__losses": losses}
    several = [{**run, "model__recompute": recompute} for recompute in ("none", "selective", "full")]
    none, *again = pool.run(run_each, several, ranks=2)[0]
    for found in again:
        assert_as_alone([found], none)


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Models:
    (found,) = trained(pool, MODELS, Place(), tmp_path_factory.mktemp("alone"))
    assert all(shown["lm_loss"][-1] < shown["lm_loss"][0] for shown in found.values())
    return found


@pytest.mark.full
@pytest.mark.parametrize("place", LAYOUTS, ids=str)
def test_a_layout_trains_as_one_rank(pool: Pool, alone: Any, tmp_path: Path, place: Place) -> None:
    # Experts of sub-layers cannot be cut.
    models = {n: m for n, m in MODELS.items() if place.expert_tensor == 1 or "moe__expert_sublayers" not in m}
    assert_trained_as_alone(pool, models, place, alone, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("name", OPEN)
def test_checkpoints_move_between_layouts(pool: Pool, tmp_path: Path, name: str) -> None:
    """From every layout to one rank and to TP 2 x EP 2, with the same steps afterwards."""
    model = {**SIZES, **OPEN[name], "train__steps": 4}
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
