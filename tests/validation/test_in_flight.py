"""Two micro batches in flight where they cannot be: one line with the way out; their memory."""

import pytest

from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.memory import _least_activations
from megamoe.validation.run import validate
from tests.support.ranks.runs import ds_config
from tests.support.tiny import tiny

BASE = ("train.global_batch_size=8", "model.num_layers=4", "train.in_flight=2")
REFUSALS = {
    "stages": (2, ("parallel.pipeline=2",), "2 is not possible with parallel.pipeline 2"),
    "ZeRO 3": (1, (f"parallel.deepspeed={ds_config('zero3_fp32')}",), "zero_optimization.stage 3"),
    "one micro batch": (
        1,
        ("train.global_batch_size=2", "train.micro_batch_size=2"),
        "train.global_batch_size 2 is one of each: set it to 4 or more",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    ranks, overrides, said = REFUSALS[name]
    config = tiny(*BASE, *overrides)
    found = [
        each for each in validate(config, ranks, resolve_parallel(config, ranks)) if said in each.message
    ]
    assert [each.key for each in found] == ["train.in_flight"]
    assert "\n" not in found[0].message


def test_what_is_possible() -> None:
    config = tiny(*BASE, "parallel.expert=2")
    assert not list(validate(config, 2, resolve_parallel(config, 2)))


def test_two_need_twice_the_activations() -> None:
    one, two = tiny(*BASE[:2]), tiny(*BASE)
    needed = [_least_activations(each, resolve_parallel(each, 1), 100) for each in (one, two)]
    assert needed[1] == 2 * needed[0] > 0
