"""Lists of `model.recompute` that cannot be: refused by key, with the reason."""

import pytest

from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.run import validate
from tests.support.ranks.runs import ds_config
from tests.support.tiny import tiny

ZERO_3 = f"parallel.deepspeed={ds_config('zero3_fp32')}"
# By the list: a part of the message, and further overrides.
REFUSALS: dict[str, tuple[str, ...]] = {
    "[norms, norms]": ("names a module twice",),
    "[block, norms]": ("block contains all others",),
    "[moe_layer, moe]": ("moe_layer contains moe",),
    "[moe, experts_activation]": ("moe contains experts_activation",),
    "[latent_up]": ("needs model.latent",),
    "[shared_experts]": ("needs moe.num_shared_experts above 0",),
    "[moe]": ("needs an MoE layer", "moe.layers={at: []}"),
    "[norms]": ("at zero_optimization.stage 3", ZERO_3),
}


def found(*overrides: str) -> list[str]:
    config = tiny(*overrides)
    problems = validate(config, 1, resolve_parallel(config, 1))
    return [problem.message for problem in problems if problem.key == "model.recompute"]


@pytest.mark.parametrize("chosen", REFUSALS)
def test_refusals(chosen: str) -> None:
    reason, *overrides = REFUSALS[chosen]
    (message,) = found(f"model.recompute={chosen}", *overrides)
    assert reason in message


@pytest.mark.parametrize("chosen", ["none", "full", "[]", "[norms, core_attention, moe]", "[block]"])
def test_what_can_be(chosen: str) -> None:
    assert not found(f"model.recompute={chosen}")
