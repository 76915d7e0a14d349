"""Every layout trains as one rank does: losses, gradient norm, and the experts of every token."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import (
    SMALL_RUN,
    WORDS,
    Place,
    assert_as_alone,
    ds_config,
    run_each,
    run_steps,
)

STEPS = 3
CLIP = SMALL_RUN["optimizer"]["grad_clip"]


@pytest.fixture(scope="module")
def one_rank(pool: Pool) -> dict[str, Any]:
    (found,) = pool.run(run_steps, STEPS, ranks=1)
    return found


def test_the_run_can_detect_a_difference(one_rank: dict[str, Any]) -> None:
    """Masks differ between micro batches, clipping acts, and the auxiliary losses count."""
    for masks in one_rank["masks"]:
        assert len(masks) == 8
        assert max(masks) > 1.2 * min(masks)
    assert min(one_rank["grad_norm"]) > CLIP
    for lm_loss, loss in zip(one_rank["lm_loss"], one_rank["loss"], strict=True):
        assert loss > lm_loss + 0.05
    experts = torch.cat(one_rank["chosen"])[:, 3]
    assert experts.bincount(minlength=8).min() > 0


@pytest.mark.parametrize("place", [Place(2, expert=2), Place(4, expert=4, zero=3)], ids=str)
def test_a_layout_trains_as_one_rank_does(
    pool: Pool, one_rank: dict[str, Any], tmp_path: Path, place: Place
) -> None:
    """test_matrix.py has all of them."""
    assert_as_alone(pool.run(run_steps, STEPS, **place.changes(tmp_path), ranks=place.ranks), one_rank)


def test_groups_of_parameters_train_alike(pool: Pool, one_rank: dict[str, Any]) -> None:
    """Two ranks with half of the experts each, under ZeRO 2."""
    groups = [
        {"pattern": r"router\.", "lr_scale": 0.2, "weight_decay": 0.0},
        {"pattern": r"experts\.up", "lr_scale": 2.0},
        {"pattern": "norm", "weight_decay": 0.5},
    ]
    changes: dict[str, Any] = {"optimizer__groups": groups}
    expected = pool.run(run_steps, STEPS, **changes, ranks=1)[0]
    path = ds_config("zero2_fp32")
    found = pool.run(run_steps, STEPS, **changes, parallel__expert=2, parallel__deepspeed=path, ranks=2)
    assert_as_alone(found, expected)
    assert expected["lm_loss"][-1] != pytest.approx(one_rank["lm_loss"][-1], rel=1e-4)


def test_a_batch_may_be_cut_into_micro_batches_of_any_size(pool: Pool) -> None:
    """Without a loss whose scope is the micro batch. Jitter's draws follow the token, not its place."""
    run: dict[str, Any] = {
        "steps": STEPS,
        "moe__losses": {"z_loss": 0.1},
        "train__global_batch_size": 8,
    }
    found = pool.run(run_each, [run, {**run, "train__micro_batch_size": 4}], ranks=2)
    cut, whole = map(list, zip(*found, strict=True))
    assert len(whole[0]["masks"][0]) == 1
    assert len(cut[0]["masks"][0]) == 4
    assert sum(sum(rank["masks"][0]) for rank in cut) == sum(sum(rank["masks"][0]) for rank in whole)
    for word in WORDS:
        for rank in whole:
            assert rank[word] == pytest.approx(cut[0][word], rel=1e-5), word
