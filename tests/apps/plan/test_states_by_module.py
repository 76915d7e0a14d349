"""The states of a rank by kind of module add up to those of the rank, whatever the optimiser keeps."""

from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.apps.plan.memory import GRADIENTS, OPTIMIZER, PARAMETERS
from megamoe.apps.plan.plan_page import states_by_module
from megamoe.model.size import model_size
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.memory import states_of
from tests.support.tiny import VOCABULARY, tiny

ZERO_1 = "parallel.deepspeed=ds_configs/zero1_bf16.json"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optimizer.name=muon",),
        ("optimizer.name=muon", "moe.num_shared_experts=1", "moe.frozen=[experts]"),
        ("optimizer.moments=bf16", "optimizer.ema=0.9"),
    ],
    ids=str,
)
def test_modules_add_up_to_the_rank(overrides: tuple[str, ...]) -> None:
    config = tiny(ZERO_1, *overrides)
    parallel, size = resolve_parallel(config, 2), model_size(config, VOCABULARY)
    parameters = sum(size.on_rank(parallel.layout.tensor, parallel.layout.expert_ranks))
    plan: Any = SimpleNamespace(
        config=config,
        size=size,
        pipeline=None,
        run=SimpleNamespace(plan=parallel, vocabulary=SimpleNamespace(size=VOCABULARY)),
        figures=SimpleNamespace(numbers={"parameters": parameters}),
    )
    expected, found = states_of(config, parallel, size), states_by_module(plan)
    for name, size_of_rank in (
        (PARAMETERS, expected.weights),
        (GRADIENTS, expected.gradients),
        (OPTIMIZER, expected.optimizer),
    ):
        assert sum(row[name] for row in found.values()) == pytest.approx(size_of_rank), name
