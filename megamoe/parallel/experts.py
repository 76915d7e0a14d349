"""Expert-parallel groups, and the class that DeepSpeed accepts as a host of experts."""

from collections.abc import Callable

import torch.distributed as dist
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.utils import groups

from megamoe.config.schema import MoEConfig
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.part import StepContext


def group_name(expert_parallel: int) -> str:
    """DeepSpeed's name of the groups for that size."""
    return f"ep_size_{expert_parallel}"


def create_groups(expert_parallel: int) -> dist.ProcessGroup:
    """Make the expert and expert-data parallel groups (once per world); returns this rank's expert group.

    Ranks 0 .. n-1 share one set of experts, n .. 2n-1 the next copy, and so on.
    """
    name = group_name(expert_parallel)
    if name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(expert_parallel)
    group: dist.ProcessGroup = groups._get_expert_parallel_group(name)
    return group


class MarkedMoELayer(MoELayer):
    """Our layer with its experts marked as DeepSpeed marks them: a rank's own, shared with a group.

    It serves where the experts are frozen: the engine demands of every host of experts that it knows a
    group of theirs in the optimiser.
    """

    def __init__(
        self, config: MoEConfig, shape: LayerShape, context: StepContext, group: dist.ProcessGroup
    ) -> None:
        MoELayer.__init__(self, config, shape, context, group)
        self.ep_size = dist.get_world_size(group)
        self.expert_group_name = group_name(self.ep_size)
        copies = groups._get_expert_data_parallel_group(self.expert_group_name)
        for parameter in self.experts.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = self.expert_group_name  # type: ignore[attr-defined]
            parameter.ds_zero_placement_family = "autoep_expert"  # type: ignore[attr-defined]
            parameter.ds_zero_partition_group_name = self.expert_group_name  # type: ignore[attr-defined]
            # ZeRO 3 cuts a parameter over this group; without a host in the model it would not look it up.
            parameter.ds_zero_partition_process_group = copies  # type: ignore[attr-defined]


class HostedMoELayer(MarkedMoELayer, AutoEPMoELayer):
    """The same under DeepSpeed's type, whose instances the engine looks for.

    DeepSpeed's constructor is bypassed: it would build experts and a router of its own. Of its two hosts of
    experts this is the one that ZeRO 3 takes.
    """

    def __init__(
        self, config: MoEConfig, shape: LayerShape, context: StepContext, group: dist.ProcessGroup
    ) -> None:
        MarkedMoELayer.__init__(self, config, shape, context, group)
        self.num_local_experts = self.num_experts // self.ep_size
        self.ep_group_name = self.expert_group_name

    def set_deepspeed_parallelism(
        self, use_data_before_expert_parallel_: bool = False, folding_group_handles: object = None
    ) -> None:
        """The groups exist already; DeepSpeed calls this to have them made."""


def hosted_layer_factory(
    config: MoEConfig, context: StepContext, expert_parallel: int
) -> Callable[[LayerShape], MoELayer]:
    """What `model` calls for each MoE block."""
    group = create_groups(expert_parallel)
    host = MarkedMoELayer if "experts" in config.frozen else HostedMoELayer
    return lambda shape: host(config, shape, context, group)
