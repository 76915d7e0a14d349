"""Triton's kernels without a GPU: in its interpreter (triton_checks.py), and, in the full tests, through its
compiler (triton_compiled.py), each in a process of its own."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.in_subprocess import names_of_checks, output_of, verdicts_of

FILES = ("triton_products", "triton_block", "triton_adamw", "triton_late", "triton_rows", "triton_ties")
# All run in one process. Those that `make test` leaves out repeat the others in every dtype.
CHECKS = names_of_checks(*(f"tests/support/kernels/{name}.py" for name in FILES))
LONG = [
    "the_graph_can_be_gone_back_through_again",
    "weighted_experts",
    "parts_choose_alike_where_scores_tie",
    "a_whole_layer",
    "a_whole_model",
    "only_the_gradients_that_are_wanted",
    "every_grouped_product",
    "every_expert",
    "every_weighted_expert",
    "every_rms_norm",
    "every_norm_of_a_sum",
    "every_rotary",
    "more_than_two_billion_numbers",
    "a_weight_gradient_of_late_rows",
    "norms_of_late_rows",
    "rotary_of_late_positions",
    "losses_of_late_tokens",
    "operators_on_fake_tensors",
    "all_outputs_and_gradients_are_those_of_float64",
    "outputs_and_gradients_are_the_plain_ones",
]
PRODUCTS = ["forward", "to_rows", "to_weight", "up", "down_backward", "weighted_up", "weighted_down_backward"]
TENSOR_CORES = {80: ["mma.sync"], 90: ["wgmma.mma"], 100: ["tcgen05.mma"]}
# Three products in TF32 for each in fp32; blocks of 32 rows are too low for a group of four warps.
OF_A_ROUTER = {"router_scores": TENSOR_CORES, "router_to_rows": {}, "router_to_weight": {}}
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one program can have
# Of one thread. A program of W warps needs 32 W times as many, of the 65,536 of a multiprocessor.
TALL = ["rms_norm_backward", "summed_rms_norm_backward", "router_to_rows", "pairs_place"]
MOST_REGISTERS = {**dict.fromkeys([*PRODUCTS, *OF_A_ROUTER], 255), **dict.fromkeys(TALL, 128)}
# Of a router's numbers, which are fp32 in every model.
OF_FP32 = [
    "top_k",
    "router_scores",
    "router_to_weight",
    "z_loss",
    "z_loss_backward",
    "balance_loss",
    "gate_sums",
    "adamw",
]
# A thread loads one index of 64 bits at a time.
OF_INDICES = ["pairs_ends", "pairs_count", "pairs_add_up", "pairs_place"]
FEW_REGISTERS = 64  # of the other kernels: eight programs of four warps at a time
# Bytes, by capability: on an H100 it is faster with them than with fewer columns.
MOST_SPILLED = {"down_backward": {80: 16, 90: 700, 100: 16}}
MOST_SPILLED["weighted_down_backward"] = dict.fromkeys(TENSOR_CORES, 36)

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, str]:
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return verdicts_of("tests.support.kernels.triton_checks", CHECKS, request, **variables)


@pytest.mark.parametrize(
    "check", [pytest.param(check, marks=pytest.mark.full if check in LONG else ()) for check in CHECKS]
)
def test_in_the_interpreter(verdicts: dict[str, str], check: str) -> None:
    assert verdicts[check] == ""


def compiled(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Return the facts that triton_compiled.py prints of each kernel."""
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    return dict(output_of("tests.support.kernels.triton_compiled", *arguments, **variables))


EVERYWHERE = [(capability, number) for capability in (80, 90, 100) for number in ("bf16", "fp16", "fp32")]


@pytest.mark.full
@pytest.mark.parametrize(("capability", "number"), EVERYWHERE)
def test_compiles_for_gpus(capability: int, number: str, tmp_path: Path) -> None:
    """With the hints of a real launch: loads of 128 bits, tensor cores, few registers, no spills."""
    for name, facts in compiled(tmp_path, str(capability), number).items():
        assert facts["vector_loads"] or name in OF_INDICES, name
        assert facts["narrow_loads"] <= (name == "cross_entropy"), name  # the label's logit
        assert facts["registers"] <= MOST_REGISTERS.get(name, FEW_REGISTERS), name
        assert facts["spilled"] <= MOST_SPILLED.get(name, {}).get(capability, 0), name
        assert facts["shared"] <= SHARED[capability], name
        assert not facts["cuts_off"], name
        products = TENSOR_CORES[capability] if name in PRODUCTS and number != "fp32" else []
        if name in OF_A_ROUTER:
            products = OF_A_ROUTER[name].get(capability, ["mma.sync"])
        assert facts["tensor_cores"] == products, name
        rounds = name not in (*OF_FP32, *OF_INDICES, "cross_entropy")
        assert facts["rounds"] == (number == "bf16" and rounds), name


@pytest.mark.full
def test_hints_are_what_makes_loads_wide(tmp_path: Path) -> None:
    """A size that is no multiple of 16 numbers leaves narrow loads: the check above can fail."""
    facts = compiled(tmp_path, "90", "bf16", "combine_odd")["combine_odd"]
    assert not facts["vector_loads"] and facts["narrow_loads"]
