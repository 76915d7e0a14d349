"""Every registered part trains alike on 1 rank and at each layout; its state survives a checkpoint."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from megamoe.config import parse_config
from megamoe.moe.capabilities import provides
from megamoe.train.trainer import Trainer
from tests.support.moe.part_layers import PARTS, moe_tree
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import assert_as_alone, ds_config, recorded_steps, run_each, small_run

STEPS = 2
STEPS_BEFORE_SAVE = 3  # the scorer `stable` is then in its second phase

ZERO_1, ZERO_3 = ({"deepspeed": ds_config(f"zero{stage}_fp32")} for stage in (1, 3))
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP 4, ZeRO 1": {"expert": 4, **ZERO_1},
    "TP 2, SP, EP 4, ZeRO 1": {"tensor": 2, "sequence": True, "expert": 4, **ZERO_1},
    "TP 2, EP 2, expert TP 2, ZeRO 3": {"tensor": 2, "expert": 2, "expert_tensor": 2, **ZERO_3},
}
RANKS = dict.fromkeys(LAYOUTS, 4)
QUICK = "TP 2, SP, EP 2, ZeRO 1"
LAYOUTS[QUICK] = LAYOUTS["TP 2, SP, EP 4, ZeRO 1"] | {"expert": 2}
RANKS[QUICK] = 2


def on_one_rank(kind: str, name: str, data_parallel: int) -> dict[str, Any]:
    """The assignment sees the same tokens if one rank has them in one batch."""
    run = run_of(kind, name)
    moe = parse_config({"moe": moe_tree(kind, name)}).moe
    together = provides("over_all_ranks", moe.router.selector)
    return {**run, "train__micro_batch_size": data_parallel if together else 1}


SEED = 7
# Rounding decides between assignments of nearly the same total, which most seeds have.
SEEDS = {"balanced": 10}


def run_of(kind: str, name: str, **changes: Any) -> dict[str, Any]:
    tree = moe_tree(kind, name)
    return {
        **{f"moe__{key}": value for key, value in tree.items()},
        "moe__layers": {"at": [1, 2]},
        "moe__groups": [],  # of presets, which count on more layers
        "train__global_batch_size": 4,
        "seed": SEEDS.get(name, SEED),
        **changes,
    }


def _by_run() -> dict[str, list[tuple[str, str]]]:
    """Parts that the same layer contains: one run covers all of them."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for part in PARTS:
        found[json.dumps(run_of(*part), sort_keys=True)].append(part)
    return found


DISTINCT = _by_run()
NOT_AT_ZERO_3 = ("strictly_balanced", "batchwise_threshold")  # which is refused


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in LAYOUTS]
)
def test_every_part_trains_alike_on_one_rank_and_at_a_layout(pool: Pool, name: str) -> None:
    layout = LAYOUTS[name]
    data = RANKS[name] // layout.get("tensor", 1)
    size: dict[str, Any] = {"train__global_batch_size": data}  # each data-parallel rank has one micro batch
    if name == QUICK:
        size |= {"model__num_layers": 1, "moe__layers": {"at": [1]}}
    left_out = NOT_AT_ZERO_3 if "ZeRO 3" in name else ()
    runs = [parts for parts in DISTINCT.values() if parts[0][1] not in left_out]
    one = [{"steps": STEPS, **on_one_rank(*parts[0], data), **size} for parts in runs]
    many = [run_of(*parts[0], steps=STEPS, parallel=layout, **size) for parts in runs]
    (alone,) = pool.run(run_each, one, ranks=1, timeout_s=900)
    ranks = pool.run(run_each, many, ranks=RANKS[name], timeout_s=900)
    for parts, expected, *found in zip(runs, alone, *ranks, strict=True):
        assert_as_alone(found, expected, str(parts))


def save_and_go_on(
    several: list[dict[str, Any]], folder: Path, steps: int
) -> list[tuple[list[Any], list[Any]]]:
    """Job: two steps after a checkpoint at `steps`, of the run that went on and of the resumed one."""
    shown = []
    for place, changes in enumerate(several):
        output = str(folder / str(place))
        trainer = Trainer(small_run(output, **changes))
        for _ in range(steps):
            trainer.step()
        trainer.save()
        went_on = recorded_steps(trainer, 2)
        resumed = recorded_steps(Trainer(small_run(output, checkpoint__resume="auto", **changes)), 2)
        shown.append(([*went_on["loss"], *went_on["grad_norm"]], [*resumed["loss"], *resumed["grad_norm"]]))
    return shown


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "file", "steps"), [(1, "zero0_fp32", STEPS_BEFORE_SAVE), (2, "zero2_bf16", 2)]
)
def test_the_state_of_every_part_survives_a_checkpoint(
    pool: Pool, tmp_path: Path, ranks: int, file: str, steps: int
) -> None:
    """The scorer `stable` is saved in its second phase, frozen since step 2."""
    layout: dict[str, Any] = {"parallel__expert": ranks, "parallel__deepspeed": ds_config(file)}
    layout |= {"train__global_batch_size": 2, "model__num_layers": 1, "moe__layers": {"at": [1]}}
    runs = [run_of(*parts[0], **layout) for parts in DISTINCT.values()]
    for shown in pool.run(save_and_go_on, runs, tmp_path, steps, ranks=ranks, timeout_s=900):
        for parts, (went_on, resumed) in zip(DISTINCT.values(), shown, strict=True):
            assert went_on == resumed, parts
