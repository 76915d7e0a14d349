"""`gating_dropout` where experts stand across tensor-parallel ranks: a dropped step may have to send."""

from typing import Any

import pytest
import torch.distributed as dist

from megamoe.model.architectures.decoder import GPT
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config, recorded_steps, small_run

RANKS, STEPS = 4, 2
# Into how many parts the experts are cut, and what of the layout makes them as many.
ACROSS = (4, {"parallel__tensor": 2, "parallel__expert": 4})
BESIDE = (2, {"parallel__tensor": 2, "parallel__expert": 2, "parallel__expert_tensor": 2})
UNLIKE = (2, {"parallel__tensor": 2, "parallel__expert": 2})
LAYOUTS = {"across": ACROSS, "beside": BESIDE, "unlike": UNLIKE}
Found = dict[str, Any]


def run_all(spread: bool) -> dict[str, Found]:
    """Job: what each run showed; sent: all-to-alls of its steps, all of which are dropped."""
    calls: list[Any] = []
    real = dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["group"])
        return real(*args, **kwargs)

    dist.all_to_all_single = counted
    found: dict[str, Found] = {}
    for name, (parts, layout) in LAYOUTS.items():
        mask = {"name": "gating_dropout", "rate": 1.0, "ranks": parts}
        router = {"selector": {"name": "top_k", "k": 2}, "masks": [mask]}
        changes: dict[str, Any] = {**layout, "parallel__deepspeed": ds_config("zero1_fp32")} if spread else {}
        trainer = Trainer(
            small_run(moe__router=router, train__global_batch_size=4, optimizer__grad_clip=0.0, **changes)
        )
        model = trainer.engine.model
        assert isinstance(model, GPT)
        ((_, layer),) = model.moe_layers()
        dispatcher: Any = layer.dispatcher
        expert = dispatcher.expert if spread else None
        calls.clear()
        found[name] = recorded_steps(trainer, STEPS)
        found[name]["sent"] = calls.count(expert) if spread else len(calls)
        found[name]["follows_data"] = layer.router.dims.follows_data
        del trainer, model, dispatcher
    return found


@pytest.fixture(scope="module")
def ranks(pool: Pool) -> list[dict[str, Found]]:
    return pool.run(run_all, True, ranks=RANKS)


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Found]:
    (found,) = pool.run(run_all, False, ranks=1)
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_equals_one_rank(ranks: list[dict[str, Found]], alone: dict[str, Found], name: str) -> None:
    parts = LAYOUTS[name][0]
    experts = [{int(row[3]) * parts // 8 for row in chosen} for chosen in alone[name]["chosen"]]
    assert experts == [set(range(parts))] * STEPS  # micro batch n has the n-th part of the experts alone
    for rank in ranks:
        for word in ("lm_loss", "loss", "grad_norm"):
            assert rank[name][word] == pytest.approx(alone[name][word], rel=1e-5), word


def test_nothing_is_sent_where_the_experts_follow_the_data(ranks: list[dict[str, Found]]) -> None:
    for rank in ranks:
        follow = {name: found["follows_data"] for name, found in rank.items()}
        assert follow == {"across": False, "beside": True, "unlike": False}
        assert rank["beside"]["sent"] == 0
        # Sizes, and the rows there and back, forwards and backwards; two micro batches a step.
        assert rank["across"]["sent"] == rank["unlike"]["sent"] == 5 * 2 * STEPS
