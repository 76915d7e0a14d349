"""Whole runs on the pretended device: the CPU's losses, no race, no mixed devices, few waits of the host."""

from pathlib import Path
from typing import Any

import pytest

from megamoe.checkpoint.writer import NUM_PIECES, PIECE_BYTES
from tests.cuda.budget import BUDGETED, budget, budget_runs, costs_of
from tests.cuda.runs import Found, Run, assert_as_on_cpu, run_on_cpu, run_on_device
from tests.cuda.training import MEASURED, small
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import CUT_ALL, ds_config, ds_variant

Losses = dict[str, dict[str, list[float]]]
NAMES = ("plain",)
# In this run DeepSpeed's streams do not wait for each other.
FAULT = "without_waits"
# Runs of `make test-full`.
OTHERS = (
    *("overlapping", "cut", "tensor_parallel", "by_node", "padded", "dropped", "scattered"),
    *("stages", "context", "in_flight", "in_flight_by_node"),
)
# Of tests whose names do not say which runs they read.
NEEDED = {
    "test_a_stream_that_does_not_wait_is_found_in_a_run": (FAULT,),
    "test_fixed_shares_need_no_wait_in_a_layer": ("padded", "by_node"),
    "test_at_zero3_a_parameter_at_a_time_is_whole_on_the_device": ("cut",),
}
# The other budget is left to `make test-full`: this one has the waits of expert parallelism too.
BUDGETS = [
    pytest.param(name, marks=() if name == "expert_parallel" else pytest.mark.full) for name in BUDGETED
]


def runs_of_names(folder: Path) -> list[Run]:
    """Each of NAMES and OTHERS, and FAULT."""
    overlap = ds_variant(folder, "zero2_bf16", zero_optimization={"overlap_comm": True})
    # So small a bucket that every matrix is reduced by itself, beside the backward pass.
    scattered = ds_variant(
        folder, "zero1_bf16", zero_optimization={"overlap_comm": True, "reduce_bucket_size": 1000}
    )
    cut = ds_variant(folder, "zero3_fp32", zero_optimization=CUT_ALL)
    some = ["norms", "core_attention", "shared_experts", "moe"]
    more = {"moe__num_shared_experts": 1, "data__workers": 1}
    two: dict[str, Any] = {"train__global_batch_size": 8, "parallel__expert": 2, "train__steps": 2}
    tensor = {"tensor": 2, "sequence": True, "expert": 2, "deepspeed": ds_config("zero1_fp32")}
    by_node = {"exchange": "by_node", "node_size": 1, "expert": 2, "deepspeed": scattered}
    in_flight = {**two, "train__in_flight": 2, "moe__num_shared_experts": 1}
    stages = {"pipeline": 2, "pipeline_chunks": 2, "deepspeed": ds_config("zero1_bf16")}
    context = {"context": 2, "expert": 2, "deepspeed": ds_config("zero1_bf16")}
    staged: dict[str, Any] = {"model__num_layers": 4, "train__global_batch_size": 8, "train__steps": 2}
    # The experts of gpt-oss, Granite's factors, DeepSeek-V3's multi-token prediction.
    open_models: dict[str, Any] = {
        "moe__expert_bias": True,
        "model__activation": "swiglu_clamped",
        "model__residual_scale": 0.5,
        "model__logit_soft_cap": 5.0,
        "model__multi_token_prediction": {"depth": 1},
    }
    capacity = {"selector": {"name": "top_k", "k": 2}, "capacity": {"name": "per_expert", "factor": 1.0}}
    # In 8 bits, beside shared experts, over two nodes of a rank each.
    by_node = {"expert": 2, "exchange": "by_node", "node_size": 1, "exchange_dtype": "fp8"}
    by_node["deepspeed"] = ds_config("zero1_bf16")
    measured = {"train__global_batch_size": 8, "parallel__expert": 2, "train__steps": MEASURED}
    in_shares = {**capacity, "capacity": {"name": "per_expert", "factor": 1.5, "pad": True}}
    return [
        Run(small("by_node", **{**measured, **more, "parallel": by_node}), 2),
        Run(
            small("padded", **measured, moe__router=in_shares, parallel__deepspeed=ds_config("zero1_bf16")), 2
        ),
        Run(small("plain", checkpoint__every=2, data__workers=1)),
        Run(small("dropped", moe__router=capacity, model__recompute="full", train__global_batch_size=4)),
        Run(small("cut", **two, parallel__deepspeed=cut), 2),  # before the large buckets of others
        Run(small("overlapping", **two, parallel__deepspeed=overlap, **more, model__recompute=some), 2),
        Run(small("scattered", parallel__deepspeed=scattered, train__global_batch_size=8), 2),
        Run(small("tensor_parallel", parallel=tensor, moe__losses={"switch_balance": 0.1}, **open_models), 2),
        Run(small("stages", **staged, parallel=stages), 2),
        Run(small("context", **staged, parallel=context), 2),
        Run(small("in_flight", **in_flight, parallel__deepspeed=overlap, model__recompute=some), 2),
        Run(small("in_flight_by_node", **{**in_flight, "parallel": by_node}, model__recompute="full"), 2),
        Run(small(FAULT, **two, parallel__deepspeed=overlap), 2, fault="wait_stream"),
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Found]:
    folder = tmp_path_factory.mktemp("device")
    selected = [item.name for item in request.session.items]
    asked = {name for name in (*OTHERS, *BUDGETED) if any(f"[{name}]" in item for item in selected)}
    asked.update(name for item in selected for name in NEEDED.get(item, ()))
    runs = [run for run in runs_of_names(folder) if run.name in (*NAMES, *asked)]
    runs += [run for name in BUDGETED if name in asked for run in budget_runs(name)]
    return run_on_device(runs, folder, devices=2)


def largest_of(budgeted: str) -> str:
    """Return the name of the run with the most layers and micro batches."""
    return budget_runs(budgeted)[-1].name


@pytest.fixture(scope="module")
def on_cpu(pool: Pool, found: dict[str, Found]) -> Losses:
    names = [name for name in (*NAMES, *OTHERS, *map(largest_of, BUDGETED)) if name in found]
    return run_on_cpu(pool, [found[name].run for name in names])


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_a_run_is_the_same_as_on_the_cpu(found: dict[str, Found], on_cpu: Losses, name: str) -> None:
    assert_as_on_cpu(found[name], on_cpu[name])


@pytest.mark.parametrize("budgeted", BUDGETS)
def test_a_measured_run_is_the_same_as_on_the_cpu(
    found: dict[str, Found], on_cpu: Losses, budgeted: str
) -> None:
    assert_as_on_cpu(found[largest_of(budgeted)], on_cpu[largest_of(budgeted)])


@pytest.mark.full
def test_a_stream_that_does_not_wait_is_found_in_a_run(found: dict[str, Found]) -> None:
    assert not found[FAULT].errors().strip(), found[FAULT].errors()
    assert found[FAULT].all_of("race")


@pytest.mark.full
def test_fixed_shares_need_no_wait_in_a_layer(found: dict[str, Found]) -> None:
    """So a layer could be captured in a CUDA graph. By node there is one wait in each."""

    def waits(name: str) -> int:
        return sum("megamoe/moe/" in place for place in found[name].step()["syncs"])

    assert waits("padded") == 0
    assert waits("by_node") == 2 * (2 + 2)  # layers x (micro batches, and a validation and a test batch)


def test_a_save_pins_two_pieces(found: dict[str, Found]) -> None:
    """Whatever the model's size."""
    assert found["plain"].of_rank[0]["pinned_bytes"] == NUM_PIECES * PIECE_BYTES


@pytest.mark.parametrize("name", ["plain", pytest.param("overlapping", marks=pytest.mark.full)])
def test_loader_processes_are_forked_before_the_device_is_used(found: dict[str, Found], name: str) -> None:
    for rank in found[name].of_rank:
        assert rank["used_at_fork"] == []


@pytest.mark.full
def test_at_zero3_a_parameter_at_a_time_is_whole_on_the_device(found: dict[str, Found]) -> None:
    """Until DeepSpeed builds its engine from the slices; beside them lie the buffers and small tensors."""
    for rank in found["cut"].of_rank:
        built = rank["built"]
        assert built["kept"] <= built["most"] <= built["kept"] + built["largest"] + 1000 < built["whole"]


@pytest.mark.parametrize("kind", ["synchronisations", "kernels"])
@pytest.mark.parametrize("name", BUDGETS)
def test_a_step_stays_within_its_budget(found: dict[str, Found], name: str, kind: str) -> None:
    costs = costs_of(name, found)[kind]
    allowed = budget()[name][kind]
    above = {part: count for part, count in costs.totals().items() if count > allowed[part]}
    assert not above, f"{kind} of {name}: {costs.totals()}, allowed {allowed}\n{costs.told()}"
