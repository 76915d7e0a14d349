"""Runs of which a part is frozen: at every layout, alone or together, and resumed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.initial_weights import STEP_1, refusal, weights_of_run
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import PLAIN_FILES, ds_config, run_steps

STEPS = 3
full = pytest.mark.full
BOTH = ["router", "experts"]
FROZEN_LAYOUTS = [("zero0_bf16", 2)]
FROZEN_REST = [
    pytest.param(file, expert, marks=full)
    for file in PLAIN_FILES
    for expert in (1, 2)
    if (file, expert) not in FROZEN_LAYOUTS
]


@pytest.fixture(scope="module")
def moe_fp32(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after one step of 2 ranks."""
    output = tmp_path_factory.mktemp("moe")
    run: dict[str, Any] = {
        "parallel__expert": 2,
        "parallel__deepspeed": ds_config("zero1_fp32"),
        "output": output,
    }
    pool.run(weights_of_run, 1, True, **run, ranks=2)
    return output / STEP_1


@pytest.fixture(scope="module")
def plain(pool: Pool, moe_fp32: Path) -> dict[str, Any]:
    """One rank, fp32, no ZeRO, all frozen."""
    run: dict[str, Any] = {"moe__frozen": BOTH, "checkpoint__init": {"path": str(moe_fp32)}}
    (found,) = pool.run(weights_of_run, STEPS, **run, ranks=1)
    return found


def _is_frozen(name: str, frozen: list[str]) -> bool:
    return any(f".mlp.layer.{module}." in name for module in frozen)


def _assert_frozen(here: dict[str, Any], frozen: list[str]) -> None:
    """Frozen weights keep their bits and are not the optimiser's; every other one has moved."""
    assert here["masters"].keys() == {name for name in here["before"] if not _is_frozen(name, frozen)}
    moved = {name for name in here["before"] if not torch.equal(here["before"][name], here["after"][name])}
    assert not [name for name in moved if _is_frozen(name, frozen)]
    assert here["masters"].keys() - moved <= {n for n in here["before"] if "norm" in n}  # 1 is coarse in bf16


@pytest.mark.parametrize(("file", "expert"), [*FROZEN_LAYOUTS, *FROZEN_REST])
def test_frozen_weights_do_not_change_and_the_rest_trains_as_on_one_rank(
    pool: Pool, moe_fp32: Path, plain: dict[str, Any], file: str, expert: int
) -> None:
    run: dict[str, Any] = {"moe__frozen": BOTH, "checkpoint__init": {"path": str(moe_fp32)}}
    layout: dict[str, Any] = {"parallel__expert": expert, "parallel__deepspeed": ds_config(file)}
    found = pool.run(weights_of_run, STEPS, **run, **layout, ranks=2)
    tolerance = 3e-2 if "bf16" in file else 1e-5
    for here in found:
        _assert_frozen(here, BOTH)
        for step, expected in zip(here["steps"], plain["steps"], strict=True):
            assert step == pytest.approx(expected, rel=tolerance)
            assert step[1] > step[0] + 0.05  # the auxiliary losses stay on


@pytest.mark.parametrize(("file", "module"), [("zero0_bf16", "router"), ("zero1_fp32", "experts")])
def test_one_of_them_is_frozen_by_itself(pool: Pool, file: str, module: str) -> None:
    layout: dict[str, Any] = {"parallel__expert": 2, "parallel__deepspeed": ds_config(file)}
    for here in pool.run(weights_of_run, STEPS, moe__frozen=[module], **layout, ranks=2):
        _assert_frozen(here, [module])


@full
@pytest.mark.parametrize("file", PLAIN_FILES)
def test_a_frozen_run_resumes_bit_for_bit(pool: Pool, moe_fp32: Path, tmp_path: Path, file: str) -> None:
    """It does not load `init` again, which no longer exists."""
    source = tmp_path / "source" / moe_fp32.name
    shutil.copytree(moe_fp32, source)
    run: dict[str, Any] = {
        "moe__frozen": BOTH,
        "checkpoint__init": {"path": str(source)},
        "checkpoint__resume": "auto",
        "parallel__expert": 2,
        "parallel__deepspeed": ds_config(file),
    }
    whole = pool.run(run_steps, 4, **run, output=tmp_path / "whole", ranks=2)
    first = pool.run(run_steps, 2, True, **run, output=tmp_path / "cut", ranks=2)
    shutil.rmtree(source)
    second = pool.run(run_steps, 2, **run, output=tmp_path / "cut", ranks=2)
    for word in ("lm_loss", "loss", "grad_norm"):
        assert first[0][word] + second[0][word] == whole[0][word]
    (message, _) = pool.run(refusal, **{**run, "moe__frozen": []}, output=tmp_path / "cut", ranks=2)
    assert "saved with moe.frozen ['router', 'experts'], this run has []" in message
