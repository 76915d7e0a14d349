"""Dropout under tensor parallelism: the ranks of a micro batch stay in step, recomputation draws the same."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from deepspeed.moe.utils import is_moe_param
from torch import Tensor
from torch.nn import functional

from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config, small_run

RANKS, TENSOR, STEPS = 4, 2, 2
RUN: dict[str, Any] = {
    "model__hidden_dropout": 0.2,
    "model__attention_dropout": 0.2,
    "model__norm": "layernorm",
    "model__bias": True,
    "moe__layers": {"at": [2], "insert_after": [1]},
    "moe__expert_output_dropout": 0.2,
    "train__global_batch_size": 4,
    "parallel__tensor": TENSOR,
    "parallel__expert": 2,
    "parallel__deepspeed": ds_config("zero1_fp32"),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "whole": {"parallel__sequence": False},
    "whole, computed again": {"parallel__sequence": False, "model__recompute": "full"},
    "sequence": {"parallel__sequence": True},
    "sequence, computed again": {"parallel__sequence": True, "model__recompute": "full"},
}
Found = dict[str, Any]


def train_all() -> dict[str, Found]:
    """Job: by variant, the losses and norms, the masks that were drawn, and the parameters held whole."""
    masks: list[bytes] = []
    _record_masks(masks)
    found = {}
    for name, changes in VARIANTS.items():
        trainer = Trainer(small_run(**RUN, **changes))
        masks.clear()
        metrics = [trainer.step()[1] for _ in range(STEPS)]
        trainer.release()
        found[name] = {
            "losses": [m["train/lm_loss"] for m in metrics],
            "norms": [m["train/grad_norm"] for m in metrics],
            "masks": Counter(masks),
            "whole": {n: p.detach() for n, p in trainer.engine.model.named_parameters() if _is_whole(p)},
            "state": torch.get_rng_state(),
        }
        del trainer
    return found


def _is_whole(parameter: Tensor) -> bool:
    return not is_moe_param(parameter) and not getattr(parameter, "tensor_model_parallel", False)


def _record_masks(masks: list[bytes]) -> None:
    """Record the mask of every hidden dropout, by drawing it again from the same state."""
    real = functional.dropout

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p > 0:
            state = torch.get_rng_state()
            masks.append(real(torch.ones_like(input), p).bool().numpy().tobytes())
            torch.set_rng_state(state)
        return real(input, p, training, inplace)

    functional.dropout = dropout


@pytest.fixture(scope="module")
def ranks(pool: Pool) -> list[dict[str, Found]]:
    return pool.run(train_all, ranks=RANKS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensor_ranks_stay_in_step(ranks: list[dict[str, Found]], variant: str) -> None:
    found = [rank[variant] for rank in ranks]
    names = set(found[0]["whole"])
    for part in ("router", "shared", "layernorm.bias", "linear_proj.bias"):
        assert any(part in name for name in names), part
    for one in found[1:]:
        assert one["losses"] == found[0]["losses"] and one["norms"] == found[0]["norms"]
        for name in names:
            assert torch.equal(one["whole"][name], found[0]["whole"][name]), name
    for first in range(0, RANKS, TENSOR):
        assert torch.equal(found[first]["state"], found[first + 1]["state"])
    assert not torch.equal(found[0]["state"], found[-1]["state"])


def test_without_sequence_parallelism_tensor_ranks_drop_the_same(ranks: list[dict[str, Found]]) -> None:
    masks = [rank["whole"]["masks"] for rank in ranks]
    # After the embedding, twice in each of two blocks; the MoE layer's own output is dropped there too.
    assert [count.total() for count in masks] == [5 * RUN["train__global_batch_size"] // 2 * STEPS] * RANKS
    assert set(masks[0].values()) == {1}  # never the same twice
    for first in range(0, RANKS, TENSOR):
        assert masks[first] == masks[first + 1]
    assert not set(masks[0]) & set(masks[-1])


def test_with_sequence_parallelism_each_rank_drops_for_itself(ranks: list[dict[str, Found]]) -> None:
    masks = [rank["sequence"]["masks"] for rank in ranks]
    assert set(masks[0].values()) == {1}
    assert sum(masks, Counter()).most_common(1)[0][1] == 1


@pytest.mark.parametrize("variant", ["whole", "sequence"])
def test_what_is_computed_again_draws_the_same(ranks: list[dict[str, Found]], variant: str) -> None:
    for rank in ranks:
        once, again = rank[variant], rank[f"{variant}, computed again"]
        assert again["losses"] == pytest.approx(once["losses"], rel=1e-5)
        assert again["norms"] == pytest.approx(once["norms"], rel=1e-5)
        assert again["masks"].keys() == once["masks"].keys()
        count = len(once["masks"]) // 5  # the embedding's alone is drawn once
        assert sorted(again["masks"].values()) == [1] * count + [2] * 4 * count
        assert torch.equal(again["state"], once["state"])


def test_the_losses_are_those_of_dropout(ranks: list[dict[str, Found]]) -> None:
    """Two variants with different draws have different losses."""
    whole, sequence = (ranks[0][variant]["losses"] for variant in ("whole", "sequence"))
    assert all(a != b for a, b in zip(whole, sequence, strict=True))
    assert all(a != b for a, b in pairwise(whole))
