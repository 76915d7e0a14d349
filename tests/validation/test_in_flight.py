"""The memory of two micro batches in flight."""

from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.memory import _least_activations
from tests.support.tiny import tiny

BASE = ("train.global_batch_size=8", "model.num_layers=4", "train.in_flight=2")


def test_two_need_twice_the_activations() -> None:
    one, two = tiny(*BASE[:2]), tiny(*BASE)
    needed = [_least_activations(each, resolve_parallel(each, 1), 100) for each in (one, two)]
    assert needed[1] == 2 * needed[0] > 0
