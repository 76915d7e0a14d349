"""Process groups: one for each set of ranks, and separate ones for what the experts exchange."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state

from megamoe.apps.plan.fake_cuda import join_fake_group
from megamoe.compat import deepspeed_compat, torch_compat
from megamoe.parallel import launch
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import expert_group_name, start_groups
from tests.support.tiny import restored_process

# And the groups that are made, by the ranks in each. The world's is there already.
LAYOUTS = {
    Layout(1): [],
    Layout(2): [1, 1],
    Layout(2, expert=2): [1, 1, 2],  # the exchange beside the world's
    Layout(2, tensor=2, expert_tensor=2): [1, 1, 2],
    Layout(8, expert=8): [1] * 8 + [8],
    # tensor, experts' copies, exchange, data
    Layout(8, tensor=2, expert=4): [1] * 8 + [2] * 4 + [2] * 4 + [4] * 2 + [4] * 2,
    # tensor, copies, exchange, slices of the experts, data, those that hold all experts
    Layout(8, tensor=2, expert=2, expert_tensor=2): [1] * 8 + [2] * 4 * 4 + [4] * 2 + [4] * 2,
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The ranks of every group that is made, in order."""
    plain = dist.new_group
    made: list[tuple[int, ...]] = []

    def new_group(ranks: Any = None, *arguments: Any, **named: Any) -> Any:
        made.append(tuple(ranks))
        return plain(ranks, *arguments, **named)

    monkeypatch.setattr(dist, "new_group", new_group)
    with restored_process():
        try:
            yield made
        finally:
            launch.stop()


def ranks_of(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_group_for_each_set_of_ranks(made: list[tuple[int, ...]], layout: Layout) -> None:
    """Each purpose has the ranks that it should have, and the exchange shares its group with no gradient."""
    last = layout.ranks - 1
    join_fake_group(last, layout.ranks)
    found = start_groups(layout, timeout_minutes=1)
    assert sorted(map(len, made)) == sorted(LAYOUTS[layout])

    own = [layout.expert_groups(), layout.expert_tensor_groups()]
    exchange = [found.layer.expert, found.layer.expert_tensor]
    for group, all_ranks in zip(exchange, own, strict=True):
        (expected,) = [ranks for ranks in all_ranks if last in ranks]
        assert ranks_of(group) == expected if group is not None else len(expected) == 1
    holders, copies = deepspeed_compat.expert_groups(expert_group_name(layout))
    assert [ranks_of(holders)] == [ranks for ranks in layout.expert_holder_groups() if last in ranks]
    assert [ranks_of(copies)] == [ranks for ranks in layout.expert_copy_groups() if last in ranks]
    data = parallel_state.get_data_parallel_group()
    tensor = parallel_state.get_tensor_model_parallel_group()
    assert ranks_of(data) == list(range(layout.tensor_rank(last), layout.ranks, layout.tensor))
    assert ranks_of(tensor) == list(range(last - layout.tensor + 1, last + 1))
    assert not {id(group) for group in exchange if group} & {id(data), id(tensor), id(copies)}


def test_what_layers_exchange_is_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    """On NCCL the groups of the exchange get a stream of high priority, and those of gradients none."""
    plain, urgent = dist.new_group, list[tuple[int, ...]]()

    def new_group(ranks: Any = None, *arguments: Any, pg_options: Any = None, **named: Any) -> Any:
        if pg_options == "urgent":
            urgent.append(tuple(ranks))
        return plain(ranks, *arguments, **{**named, "backend": None})

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(torch_compat, "urgent_group_options", lambda timeout: "urgent")
    layout = Layout(8, tensor=2, expert=4)
    with restored_process():
        try:
            join_fake_group(0, layout.ranks)
            monkeypatch.setattr(launch, "_backend", "nccl")
            start_groups(layout, timeout_minutes=1)
        finally:
            launch.stop()
    assert urgent == [tuple(ranks) for ranks in layout.expert_groups()]


def test_a_second_layout_of_a_world_makes_only_what_is_new(made: list[tuple[int, ...]]) -> None:
    join_fake_group(0, 4)
    start_groups(Layout(4), timeout_minutes=1)
    made.clear()
    start_groups(Layout(4, expert=2), timeout_minutes=1)
    assert sorted(made) == [(0, 1), (0, 2), (1, 3), (2, 3)]  # the exchange, and the experts' copies
    made.clear()
    start_groups(Layout(4), timeout_minutes=1)
    assert made == []


def test_groups_do_not_outlive_their_world(made: list[tuple[int, ...]]) -> None:
    for _ in range(2):
        join_fake_group(0, 2)
        start_groups(Layout(2), timeout_minutes=1)
        assert parallel_state.get_data_parallel_group() is dist.group.WORLD
        launch.stop()
    assert made == [(0,), (1,)] * 2
