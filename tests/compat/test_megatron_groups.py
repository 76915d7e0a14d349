"""Canaries of Megatron-Core's process groups."""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megamoe.apps.plan.fake_cuda import join_fake_group
from megamoe.compat.megatron_groups import groups_made_by
from megamoe.parallel import launch
from tests.support.tiny import restored_process


def start_megatron() -> None:
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def test_a_group_for_each_purpose(monkeypatch: Any) -> None:
    """By itself it makes many groups of the same ranks; inside it takes what it is given."""
    plain, made, given = dist.new_group, list[tuple[int, ...]](), list[tuple[int, ...]]()

    def new_group(*arguments: Any, **named: Any) -> Any:
        made.append(tuple(named["ranks"]))
        return plain(*arguments, **named)

    def give(ranks: Any, timeout: Any) -> Any:
        given.append(tuple(ranks))
        return dist.group.WORLD

    with restored_process():
        try:
            join_fake_group(0, 8)
            with monkeypatch.context() as patch:
                patch.setattr(dist, "new_group", new_group)
                start_megatron()
                assert len(made) > 2 * len(set(made)), "Megatron-Core shares groups by itself now"
                parallel_state.destroy_model_parallel()
                count = len(made)
                with groups_made_by(give):
                    start_megatron()
            assert len(made) == count and given == made
            assert parallel_state.get_tensor_model_parallel_group() is dist.group.WORLD
        finally:
            launch.stop()
