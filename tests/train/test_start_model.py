"""What a run says when it starts from a dense model's weights."""

from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.checkpoint.init_from import InitialWeights
from megamoe.train.start_model import _tell_the_start
from tests.support.tiny import tiny

COPY = ("checkpoint.init={path: dense, experts: copy}", "moe.num_shared_experts=0")
TOP_1 = "moe.router.selector={name: top_k, k: 1, weights: raw}"
CASES = {
    "two experts whose weights sum to 1": ((), None),
    "raw weights": (
        (TOP_1,),
        "moe.router.selector top_k gives to a token's experts do not sum to 1; choose at",
    ),
    "another scale": (("moe.router.selector={name: top_k, k: 2, scale: 2.5}",), "do not sum to 1; choose at"),
    "a capacity": (("moe.router.capacity={name: per_expert, factor: 1}",), "capacity per_expert drops pairs"),
    "shared experts": (("moe.num_shared_experts=1",), "shared experts, which are as drawn, add to it"),
}


@pytest.mark.parametrize("case", CASES)
def test_copies_that_do_not_compute_what_the_dense_model_does_are_told(case: str) -> None:
    changes, expected = CASES[case]
    weights: Any = InitialWeights.__new__(InitialWeights)
    vars(weights).update(vars(SimpleNamespace(kept=[], new_head=False)))
    said: list[str] = []
    _tell_the_start(tiny(*COPY, *changes), weights, said.append)
    assert said[0] == "weights from dense, experts: copy"
    warnings = said[1:]
    assert len(warnings) == (expected is not None)
    assert all(line.startswith("warning: the model does not begin as the dense one: ") for line in warnings)
    assert all(str(expected) in line for line in warnings)
