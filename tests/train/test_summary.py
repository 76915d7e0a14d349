"""The summary before a run: its MoE layers, its length and its parameters."""

from types import SimpleNamespace
from typing import Any, cast

from megamoe.config import RunConfig
from megamoe.data.vocabulary import Vocabulary
from megamoe.kernels.choice import Kernels
from megamoe.optim.schedule import BatchSchedule
from megamoe.parallel.launch import find_world
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.train.objective import build_objective
from megamoe.train.resolved import ResolvedRun
from megamoe.train.summary import summary_record, summary_rows
from tests.support.tiny import VOCABULARY, tiny

WORDS = cast(Vocabulary, SimpleNamespace(size=VOCABULARY))


def run_of(config: RunConfig, steps: int = 4) -> ResolvedRun:
    """On one rank, with 48 words."""
    plan, schedule = resolve_parallel(config, 1), BatchSchedule.from_config(config.train, 1)
    objective, kernels = build_objective(config, WORDS), Kernels.of(config.model)
    return ResolvedRun(config, plan, WORDS, schedule, steps, "{}", objective, kernels, "mock data")


def rows_of(*overrides: str) -> dict[str, Any]:
    rows = summary_rows(run_of(tiny(*overrides)), find_world(), first_step=0, samples=0)
    return dict(rows["model"])


def test_the_layers_and_their_experts_are_named(one_rank: None) -> None:
    found = rows_of(
        "moe.layers={at: [2], insert_after: [1]}",
        "moe.num_experts=6",
        "moe.expert_sublayers=3",
        "moe.router.score_function=sigmoid",
        "moe.losses.z_loss=0.5",
    )
    assert found["MoE blocks"] == "2, after 1"
    assert found["experts"] == "6 of FFN size 12, each a stack of 3"
    assert found["router"] == "linear -> sigmoid -> top_k"
    assert found["auxiliary losses"] == "z_loss 0.5"
    found = rows_of("moe.num_shared_experts=2")
    assert (found["MoE blocks"], found["experts"]) == ("1, 2", "4 of FFN size 12, 2 shared")
    assert found["auxiliary losses"] == "none"
    assert rows_of("moe.latent_size=8")["experts"] == "4 of FFN size 12 on latent rows of 8"


def test_the_run_is_given_in_steps(one_rank: None) -> None:
    config = tiny("train.steps=null", "train.epochs=1.5", "optimizer.warmup_share=0.1", "optimizer.name=adam")
    rows = dict(summary_rows(run_of(config, steps=1234), find_world(), first_step=0, samples=0)["run"])
    assert rows["data"] == "mock data"
    assert rows["steps"] == "1,234 (1.5 epochs), from the start"
    assert rows["tokens to come"] == f"{1234 * 2 * 8:,}"
    assert rows["optimiser"] == "Adam, lr 0.0003, cosine after 124 steps of warm-up"


def test_the_activation_is_named_and_the_experts_own(one_rank: None) -> None:
    assert rows_of("model.activation=relu")["activation"] == "relu"
    assert rows_of("moe.expert_activation=gelu")["activation"] == "swiglu, of experts gelu"
    assert rows_of("moe.expert_activation=gelu", "moe.layers=none")["activation"] == "swiglu"


def test_a_dense_model_has_no_rows_of_experts(one_rank: None) -> None:
    found = rows_of("moe.layers=none")
    assert found["FFN"] == "dense, size 24"
    assert "experts" not in found


def test_active_parameters_are_those_of_a_tokens_mean_choices(one_rank: None) -> None:
    """A k that is no whole number, too."""
    config = tiny("moe.router.selector={name: expert_choice, k: 1.5, allow_non_causal: true}")
    record = summary_record(run_of(config))
    expert = 3 * 16 * 12
    assert record["parameters_routed_experts"] == 2 * 4 * expert
    assert record["parameters_total"] - record["parameters_active"] == round(2 * (4 - 1.5) * expert)
