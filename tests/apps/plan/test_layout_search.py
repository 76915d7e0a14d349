"""The search of layouts: its best is the best of all, and its figures are those of a plan."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.apps.plan import layout_search
from megamoe.apps.plan.hardware import GPUS
from megamoe.apps.plan.layout_estimate import Estimate, Sizes, estimate
from megamoe.apps.plan.layout_search import (
    Candidate,
    SearchResult,
    _parallel_plan,
    legal_ones,
    ordered,
    table,
    variants,
)
from megamoe.apps.plan.plan import Cluster
from megamoe.config import load_config
from megamoe.errors import UserError
from tests.apps.plan.test_simulation import run_in_process
from tests.support.apps.check_search import CLUSTER, MODEL

FIRST = 4  # layouts that the short search simulates
ALL = 1000


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's, of numbers without ties."""
    first, second = ([sorted(column).index(value) for value in column] for column in zip(*pairs, strict=True))
    squares = sum((x - y) ** 2 for x, y in zip(first, second, strict=True))
    return 1 - 6 * squares / (len(pairs) * (len(pairs) ** 2 - 1))


@pytest.mark.full
def test_the_best_is_the_best_of_all_layouts() -> None:
    """On 4 ranks, in two nodes. One process runs the short search, the exhaustive one and a plan."""
    [printed] = run_in_process("tests.support.apps.check_search", str(FIRST), str(ALL))
    few, all_of_them = printed["found"]
    assert few["layouts"][0] == all_of_them["layouts"][0]
    assert len(few["layouts"]) == FIRST
    assert not all_of_them["refused"]
    count = len(all_of_them["layouts"])
    assert count == all_of_them["considered"] - all_of_them["illegal"] > 5 * FIRST
    assert all_of_them["illegal"]
    # The same layout has the same figures in both searches, and those of a plan.
    assert all(layout in all_of_them["layouts"] for layout in few["layouts"])
    assert printed["plan"] == few["layouts"][0]["plan"]
    times = [
        (layout["estimated_step_seconds"], layout["plan"]["step_seconds"])
        for layout in all_of_them["layouts"]
    ]
    assert rank_correlation(times) > 0.8
    assert [time for _, time in times] == sorted(time for _, time in times)


def test_layouts_are_legal_by_the_rules_of_training() -> None:
    config = load_config(None, [*MODEL])
    every = list(variants(config, CLUSTER))
    legal = legal_ones(every, CLUSTER.ranks)
    assert {each.parallel.expert for each in every} == {1, 2, 3}
    assert {each.parallel.expert for each in legal} == {1, 2}
    assert {each.parallel.tensor for each in legal} == {1, 2}
    assert any(each.parallel.sequence for each in legal)
    assert len({each.parallel.deepspeed for each in legal}) == 4
    # A global batch of 16 is no multiple of 8 sequences on each of 4 ranks.
    alone = [
        each for each in legal if each.parallel == replace(each.parallel, pipeline=1, context=1, tensor=1)
    ]
    assert max(each.train.micro_batch_size for each in alone) == 4
    assert {(each.parallel.pipeline, each.parallel.context) for each in legal} >= {(2, 1), (1, 2)}
    # A dense model has nothing to cut into experts.
    dense = load_config(None, [*MODEL, "moe.layers.every=null"])
    assert {each.parallel.expert * each.parallel.expert_tensor for each in variants(dense, CLUSTER)} == {1}


def test_layouts_that_fit_come_first() -> None:
    """By their time; the others by their size, and not those that are far too large."""
    config = load_config(None, [*MODEL])
    sizes = [(3.0, 50.0), (1.0, 110.0), (2.0, 90.0), (0.1, 200.0)]
    estimates = [Estimate(seconds, size, 16) for seconds, size in sizes]
    found = ordered([Candidate(config, each) for each in estimates], usable=100.0)
    assert [each.estimate.seconds for each in found] == [2.0, 3.0, 1.0]


def test_layouts_that_offload_come_after_those_that_fit_without() -> None:
    """Their update on the host takes no time in a plan."""
    files = ("zero2_bf16_offload_cuda", "zero2_bf16_cuda")
    configs = [load_config(None, [*MODEL, f"parallel.deepspeed=ds_configs/{name}.json"]) for name in files]
    known = [Candidate(each, Estimate(1.0 + n, 50.0, 16)) for n, each in enumerate(configs)]
    assert [each.offloads for each in ordered(known, usable=100.0)] == [False, True]


def test_layouts_of_different_batches_are_ordered_by_the_time_of_a_sample() -> None:
    """Where the global batch is not set, a smaller batch has a shorter step, and often fewer tokens/s."""
    config = load_config(None, [*MODEL, "train.global_batch_size=null"])
    sizes = Sizes.of(config)
    of_cluster = sizes, CLUSTER.gpu, CLUSTER.gpus_per_node, 1.0
    known = [
        Candidate(each, estimate(each, _parallel_plan(each, CLUSTER.ranks), *of_cluster))
        for each in variants(config, CLUSTER)
    ]
    for candidate in known:
        parallel = candidate.config.parallel
        ranks = CLUSTER.ranks // (parallel.tensor * parallel.pipeline * parallel.context)
        assert candidate.estimate.samples == candidate.config.train.micro_batch_size * ranks
    best = ordered(known, usable=float("inf"))[0]
    speeds = [each.estimate.samples / each.estimate.seconds for each in known]
    assert best.estimate.samples / best.estimate.seconds == pytest.approx(max(speeds))
    assert best.estimate.seconds > min(each.estimate.seconds for each in known)


def test_the_table_names_the_batches() -> None:
    """Plans here are stubs: the table reads five of their figures."""
    config = load_config(None, [*MODEL])
    speed = {"step_seconds": 0.5, "tokens_per_second": 65536.0, "utilisation": 0.25}
    plan: Any = SimpleNamespace(**speed, peak_bytes=2e9, usable_bytes=3e9, fits=True)
    for batch, ranked in ((16, False), (None, True)):
        own = replace(config, train=replace(config.train, global_batch_size=batch))
        found = SearchResult(1, 0, 0, 0, [(Candidate(own, Estimate(0.4, 1.0, 16)), plan)], [])
        lines = table(found).splitlines()
        assert lines[3].split()[:3] == ["500.0", "16", "65,536"]
        assert lines[4:] == ([lines[-1]] if ranked else [])
        assert lines[-1].startswith("train.global_batch_size is not set") == ranked


def test_a_model_that_no_layout_can_simulate_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise UserError("model.backend: no Transformer Engine here")

    monkeypatch.setattr(layout_search, "make_plan", refuse)
    message = r"--search: none of \d+ layouts can be simulated; parallel\..*: model.backend: no Transformer"
    with pytest.raises(UserError, match=message):
        layout_search.search(load_config(None, [*MODEL]), CLUSTER)


def test_what_needs_as_much_memory_is_known() -> None:
    config = load_config(None, [*MODEL, "model.recompute=selective", "train.micro_batch_size=2"])
    cluster = Cluster(1, 1, GPUS["h100"])
    found = [Candidate(each, Estimate(1.0, 1.0, 1)) for each in variants(config, cluster)]
    base = next(each for each in found if each.config == replace(config, parallel=each.config.parallel))
    same = [each for each in found if each.config.parallel == base.config.parallel]
    more = {
        (str(it.config.model.recompute), it.config.train.micro_batch_size)
        for it in same
        if it.needs_as_much(base)
    }
    kinds = ("none", "['norms']", "['norms', 'moe']", "selective")
    assert more == {(kind, micro) for kind in kinds for micro in (2, 4, 8)}
    assert not any(it.needs_as_much(base) for it in found if it not in same)
