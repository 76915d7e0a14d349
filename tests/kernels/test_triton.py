"""Triton's kernels without a GPU: in its interpreter (triton_checks.py), and, in the full tests, through its
compiler (triton_compiled.py), each in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# All run in one process. Those that `make test` leaves out repeat the others in every dtype.
CHECKS = [
    "grouped_products",
    "experts",
    "experts_are_the_three_steps",
    "the_graph_can_be_gone_back_through_again",
    "the_host_never_reads_the_counts",
    "rms_norm",
    "a_norm_of_a_sum",
    "rotary",
    "gradients_of_heads_are_side_by_side",
    "cross_entropy",
    "cross_entropy_of_infinite_logits",
    "the_first_sort_is_enough",
    "outputs_and_gradients_are_those_of_float64",
    "numbers_by_hand_and_at_extremes",
    "rows_by_token",
    "nothing_is_read_or_written_beside_the_rows",
    "a_nan_stays_in_its_token",
    "rows_of_more_than_two_billion_numbers",
    "what_does_not_fit_is_pytorchs",
    "the_choice",
    "scores_of_a_router",
    "weights_of_chosen_experts",
    "sums_of_a_router",
    "what_is_not_finite_stays_in_the_sums",
    "pairs_by_expert",
]
LONG = [
    "a_whole_layer",
    "a_whole_model",
    "only_the_gradients_that_are_wanted",
    "every_grouped_product",
    "every_expert",
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
PRODUCTS = ["forward", "to_rows", "to_weight", "up", "down_backward"]
TENSOR_CORES = {80: ["mma.sync"], 90: ["wgmma.mma"], 100: ["tcgen05.mma"]}
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes that one program can have
# Of one thread. A program of W warps needs 32 W times as many, of the 65,536 of a multiprocessor.
TALL = ["rms_norm_backward", "summed_rms_norm_backward", "router_scores", "router_to_rows", "pairs_place"]
MOST_REGISTERS = {**dict.fromkeys(PRODUCTS, 255), **dict.fromkeys(TALL, 128), "router_to_weight": 208}
# Of a router's numbers, which are fp32 in every model; its product is not by tensor cores.
OF_FP32 = ["router_scores", "router_to_weight", "z_loss", "z_loss_backward", "balance_loss", "gate_sums"]
# A thread loads one index of 64 bits at a time.
OF_INDICES = ["pairs_ends", "pairs_count", "pairs_add_up", "pairs_place"]
FEW_REGISTERS = 64  # of the other kernels: eight programs of four warps at a time
MOST_SPILLED = {"down_backward": 16}  # bytes

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def output_of(module: str, *arguments: str, **variables: str) -> Any:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.kernels.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, str]:
    names = [item.name for item in request.session.items]
    asked = [check for check in CHECKS + LONG if any(f"[{check}]" in name for name in names)]
    return dict(output_of("triton_checks", *asked, TRITON_INTERPRET="1"))


@pytest.mark.parametrize("check", [*CHECKS, *(pytest.param(check, marks=pytest.mark.full) for check in LONG)])
def test_in_the_interpreter(verdicts: dict[str, str], check: str) -> None:
    assert verdicts[check] == ""


EVERYWHERE = [(capability, number) for capability in (80, 90, 100) for number in ("bf16", "fp16", "fp32")]


@pytest.mark.full
@pytest.mark.parametrize(("capability", "number"), EVERYWHERE)
def test_compiles_for_gpus(capability: int, number: str, tmp_path: Path) -> None:
    """With the hints of a real launch: loads of 128 bits, tensor cores, few registers, no spills."""
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    for name, facts in output_of("triton_compiled", str(capability), number, **variables).items():
        assert facts["vector_loads"] or name in OF_INDICES, name
        assert facts["narrow_loads"] <= (name == "cross_entropy"), name  # the label's logit
        assert facts["registers"] <= MOST_REGISTERS.get(name, FEW_REGISTERS), name
        assert facts["spilled"] <= MOST_SPILLED.get(name, 0), name
        assert facts["shared"] <= SHARED[capability], name
        assert not facts["cuts_off"], name
        products = TENSOR_CORES[capability] if name in PRODUCTS and number != "fp32" else []
        assert facts["tensor_cores"] == products, name
        rounds = name not in (*OF_FP32, *OF_INDICES, "cross_entropy")
        assert facts["rounds"] == (number == "bf16" and rounds), name


@pytest.mark.full
def test_hints_are_what_makes_loads_wide(tmp_path: Path) -> None:
    """A size that is no multiple of 16 numbers leaves narrow loads: the check above can fail."""
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    facts = output_of("triton_compiled", "90", "bf16", "combine_odd", **variables)["combine_odd"]
    assert not facts["vector_loads"] and facts["narrow_loads"]
