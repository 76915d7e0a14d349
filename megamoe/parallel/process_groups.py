"""Process groups: Megatron-Core's for the dense model and ours for the experts, registered with DeepSpeed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megamoe.compat import deepspeed_compat
from megamoe.compat.megatron_groups import groups_made_by
from megamoe.moe.process_groups import ParallelGroups
from megamoe.parallel.launch import at_stop, new_group
from megamoe.parallel.layout import Layout
from megamoe.parallel.pipeline.links import StageLinks


class ModelParallelUnit:
    """Megatron-Core's parallel state with the methods that DeepSpeed expects (its `mpu`).

    DeepSpeed's model parallelism is pipeline x tensor parallelism. Its data-parallel ranks are the `replicas`
    of a layout: those of data and of context parallelism, which hold the same dense weights.
    """

    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_data_parallel_world_size = staticmethod(parallel_state.get_data_parallel_world_size)
    get_tensor_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_tensor_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_tensor_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_model_parallel_group = staticmethod(parallel_state.get_model_parallel_group)
    get_model_parallel_rank = get_tensor_model_parallel_rank
    get_pipeline_model_parallel_group = staticmethod(parallel_state.get_pipeline_model_parallel_group)
    get_pipeline_model_parallel_world_size = staticmethod(
        parallel_state.get_pipeline_model_parallel_world_size
    )

    @staticmethod
    def get_model_parallel_world_size() -> int:
        """Return pipeline x tensor."""
        return dist.get_world_size(parallel_state.get_model_parallel_group())


def expert_group_name(layout: Layout) -> str:
    """Return the name of the experts' groups in DeepSpeed, which reads the number in it."""
    return f"ep_size_{layout.expert}"


def replica_group() -> dist.ProcessGroup:
    """Return the ranks that hold the same slice of the same dense weights, whose gradients are averaged."""
    return parallel_state.get_data_parallel_group()


@dataclass(frozen=True)
class Groups:
    """The process groups of a layout that this rank is in.

    layer: those of an MoE layer. data: the ranks whose micro batches form the batch; they hold the same part
    of the model and of the sequences. stage: the ranks of this pipeline stage. pipeline: the ranks at this
    rank's place in each stage. context: those that share this rank's sequences, None: no others do. links: to
    the stages before and after; None without pipeline parallelism.
    """

    layer: ParallelGroups
    data: dist.ProcessGroup
    stage: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    context: dist.ProcessGroup | None = None
    links: StageLinks | None = None


def _shared_group(ranks: Sequence[int], timeout: timedelta | None = None) -> Any:
    """Return the one group of these ranks, whatever its purpose; the set of all ranks has the world's.

    On ranks outside of it, what `new_group` returns there. Collective over all ranks, which must ask for the
    same sets in the same order.

    On NCCL each group costs a communicator, that is memory, and time of all ranks at the start. A shared
    group is used for several purposes, so its collectives must be called in the same order on every rank.
    They are: the main thread and, while that waits, the thread of the backward pass call them, in the order
    of the program, which is the same on all ranks. The collectives between the steps find no gradients still
    on the way, because DeepSpeed waits for its reductions before it takes a step. The experts' exchange has
    groups of its own (`_make_groups`): it must not queue behind gradients that are reduced meanwhile.
    """
    key = tuple(ranks)
    if key not in _shared:
        is_world = key == tuple(range(dist.get_world_size()))
        _shared[key] = dist.group.WORLD if is_world else new_group(ranks, timeout)
    return _shared[key]


# Of the present world: the ranks that hold all experts once, those that hold the same, and the groups.
_made: dict[Layout, tuple[dist.ProcessGroup, dist.ProcessGroup, Groups]] = {}
_shared: dict[tuple[int, ...], Any] = {}  # of the present world, by their ranks


def start_groups(layout: Layout, timeout_minutes: float) -> Groups:
    """Create the groups of the layout, once per world, and register them with Megatron-Core and DeepSpeed.

    DeepSpeed sums the experts' gradients over the ranks that hold the same experts. It sums their norm over
    the ranks that together hold all experts once, which it calls the expert-parallel group.
    """
    _start_megatron(layout, timeout_minutes)
    if layout not in _made:
        _made[layout] = _make_groups(layout, timedelta(minutes=timeout_minutes))
    holders, copies, groups = _made[layout]
    deepspeed_compat.set_expert_groups(expert_group_name(layout), holders, copies)
    return groups


def groups_of(layout: Layout) -> Groups:
    """Return the groups that `start_groups` has made for a layout of the present world."""
    return _made[layout][2]


def stop_groups() -> None:
    """Forget all groups, together with the world that they belong to."""
    _made.clear()
    _shared.clear()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    deepspeed_compat.forget_groups()


at_stop(stop_groups)


def _start_megatron(layout: Layout, timeout_minutes: float) -> None:
    if parallel_state.model_parallel_is_initialized():
        sizes = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if sizes == (layout.tensor, layout.pipeline):
            return
        parallel_state.destroy_model_parallel()
    with groups_made_by(_shared_group):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            # Not context_parallel_size: its rotary positions would take parts of a sequence in zigzag order.
            pipeline_model_parallel_size=layout.pipeline,
            distributed_timeout_minutes=math.ceil(timeout_minutes),
            create_gloo_process_groups=False,  # for collectives on the CPU, which nothing here needs
        )


def _make_groups(layout: Layout, timeout: timedelta) -> tuple[dist.ProcessGroup, dist.ProcessGroup, Groups]:
    """Create the groups: new, urgent ones for what layers and stages exchange, shared ones for the rest."""
    shared, new = partial(_shared_group, timeout=timeout), partial(new_group, timeout=timeout, urgent=True)
    expert = _own(layout.expert_groups(), new) if layout.expert > 1 else None
    expert_tensor = _own(layout.expert_tensor_groups(), new) if layout.expert_tensor > 1 else None
    # Where only one of them cuts the experts, its ranks hold all. A norm is summed when no exchange runs.
    exchange = [group for group in (expert, expert_tensor) if group is not None]
    holders = exchange[0] if len(exchange) == 1 else _own(layout.expert_holder_groups(), shared)
    copies = _own(layout.expert_copy_groups(), shared)
    tokens = _own(layout.batch_groups(), shared) if layout.batch_ranks > 1 else None
    by_node = layout.nodes > 1
    between = _own(layout.between_nodes_groups(), new) if by_node else None
    inside = _own(layout.inside_node_groups(), new) if by_node and layout.nodes < layout.expert else None
    groups = Groups(
        layer=ParallelGroups(tokens, expert, expert_tensor, between, inside),
        data=_own(layout.data_groups(), shared),
        stage=_own(layout.stage_groups(), shared),
        pipeline=_own(layout.pipeline_groups(), shared),
        context=_own(layout.context_groups(), new) if layout.context > 1 else None,
        links=StageLinks.make(layout.pipeline_groups(), new) if layout.pipeline > 1 else None,
    )
    return holders, copies, groups


def _own(all_ranks: list[list[int]], make: Callable[[list[int]], Any]) -> dist.ProcessGroup:
    """Create all groups, as every rank must; return this rank's."""
    made = [make(ranks) for ranks in all_ranks]
    own = next(group for group, ranks in zip(made, all_ranks, strict=True) if dist.get_rank() in ranks)
    assert isinstance(own, dist.ProcessGroup)  # new_group returns a number for groups of other ranks
    return own
