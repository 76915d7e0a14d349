"""One step of a run with most features of a layer, on one rank and in layouts of two."""

from pathlib import Path
from typing import Any

from tests.conformance.planting import ACTIVE, on_ranks
from tests.support.ranks.gradients import Found, assert_same, gradients_of_the_engine
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place

UPDATE = 0.01  # of the bias, in a step
TP, SP = Place(2, tensor=2), Place(2, tensor=2, sequence=True)
EP, CP, PP = Place(2, expert=2), Place(2, context=2), Place(2, pipeline=2)
EP_TP, ETP = Place(2, tensor=2, expert=2), Place(2, expert_tensor=2)
NORM = "^$"
RUN: dict[str, Any] = {
    "optimizer__grad_clip": 0.0,
    "train__global_batch_size": 2,
    "model__num_attention_heads": 4,
    "model__attention": {"sinks": True, "query_key_norm": "head", "window": 6},
    "model__multi_token_prediction": {"depth": 2},
    "moe__layers": {"at": [1, 2]},
    "moe__expert_bias": True,
    "moe__shared_expert_mode": "gated",
    "moe__router": {
        "scorer": {"name": "linear", "jitter": 0.1},
        "score_function": {"name": "sigmoid", "bias_update": UPDATE},
        "selector": {"name": "top_k", "k": 2},
    },
}
_known: dict[str, list[Found]] = {}  # of what nothing was planted in


def step(pool: Pool, place: Place, planted: bool = True, **changes: Any) -> list[Found]:
    """Return what each rank found in a step of RUN with changes; planted: it has the test's defect."""
    key = repr((place, changes))
    if ACTIVE and planted:
        return _step(pool, place, changes)
    if key not in _known:
        _known[key] = _step(pool, place, changes, planted)
    return _known[key]


def _step(pool: Pool, place: Place, changes: dict[str, Any], planted: bool = True) -> list[Found]:
    runs, ranks = [{**RUN, **changes, **place.changes(Path())}], place.ranks
    if planted:
        return [one for (one,) in on_ranks(pool, gradients_of_the_engine, runs, ranks=ranks)]
    return [one for (one,) in pool.run(gradients_of_the_engine, runs, ranks=ranks)]


def assert_as_alone(pool: Pool, place: Place, only: str, **changes: Any) -> None:
    """See that the norm, and the gradients whose names match `only`, are those of one rank."""
    (alone,) = step(pool, Place(), planted=False, **changes)
    assert_same(step(pool, place, **changes), alone, place.layout, 5e-5, only)
