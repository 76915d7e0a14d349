"""What today's open models have beside standard blocks trains at every layout as on one rank, and moves."""

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
MODELS: dict[str, dict[str, Any]] = {"granite": GRANITE, "gpt_oss": GPT_OSS, "ahead": AHEAD, "latent": LATENT}


ALONE = Place()
LAYOUTS = [
    Place(4, tensor=2, expert=2, expert_tensor=2, zero=1, sequence=True, recompute="full"),
    Place(2, tensor=2),
    Place(2, expert=2, zero=3),
    Place(4, expert=2, expert_tensor=2, zero=2, recompute="selective"),
    Place(4, tensor=2, expert=2, zero=3, sequence=True),
]


def trained(pool: Pool, place: Place, folder: Path) -> list[list[dict[str, Any]]]:
    """Return what the steps of each model showed on each rank."""
    runs = [{"steps": STEPS, **SIZES, **model, **place.changes(folder)} for model in MODELS.values()]
    return pool.run(run_each, runs, ranks=place.ranks, timeout_s=600)


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    (found,) = trained(pool, ALONE, tmp_path_factory.mktemp("alone"))
    assert all(shown["lm_loss"][-1] < shown["lm_loss"][0] for shown in found)
    return found


@pytest.mark.full
@pytest.mark.parametrize("place", LAYOUTS, ids=str)
def test_a_layout_trains_as_one_rank(pool: Pool, alone: Any, tmp_path: Path, place: Place) -> None:
    found = zip(*trained(pool, place, tmp_path), strict=True)
    for name, shown, expected in zip(MODELS, found, alone, strict=True):
        assert_as_alone(list(shown), expected, name)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_move_between_layouts(pool: Pool, tmp_path: Path, name: str) -> None:
    """From every layout to one rank and to TP 2 x EP 2, with the same steps afterwards."""
    model = {**SIZES, **MODELS[name], "train__steps": 4}
    for number, layout in enumerate(LAYOUTS):
        first = {**model, **layout.changes(tmp_path), "output": tmp_path / str(number)}
        whole = {**first, "steps": 4, "name": "whole"}
        pool_of = {"ranks": layout.ranks, "timeout_s": 300}
        expected, _ = pool.run(run_each, [whole, {**first, "steps": 2, "save": True}], **pool_of)[0]
        saved = str(tmp_path / str(number) / "small/checkpoints/step_00000002")
        for target in (ALONE, LAYOUTS[0], LAYOUTS[2]):
            further = {**model, **target.changes(tmp_path), "checkpoint__resume": saved, "steps": 2}
            (found,) = pool.run(run_each, [further], ranks=target.ranks, timeout_s=300)[0]
            for word in WORDS:
                after = pytest.approx(expected[word][2:], rel=1e-5)
                assert found[word] == after, f"{layout} -> {target}: {word}"
