"""The MoE layer as DeepSpeed wants it: experts marked as a rank's own, under a type that it knows."""

from collections.abc import Callable
from typing import Any

from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

from megamoe.compat.deepspeed_compat import expert_copy_group
from megamoe.compat.deepspeed_zero import mark_expert
from megamoe.config.schema import MoEConfig
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.part import StepContext
from megamoe.moe.process_groups import ParallelGroups
from megamoe.parallel.groups import expert_group_name
from megamoe.parallel.layout import Layout


class MarkedMoELayer(MoELayer):
    """Our layer with its experts marked as DeepSpeed marks them: a rank's own, shared with a group.

    It serves where the experts are frozen: the engine demands of every host of experts that it knows a
    group of theirs in the optimiser. All else in the layer is marked for `TensorParallelGradientSync` where
    tensor parallelism spreads a micro batch's tokens over ranks.
    """

    def __init__(
        self,
        config: MoEConfig,
        shape: LayerShape,
        context: StepContext,
        groups: ParallelGroups,
        layout: Layout,
    ) -> None:
        MoELayer.__init__(self, config, shape, context, groups)
        self.ep_size = layout.expert
        self.expert_group_name = expert_group_name(layout)
        copies = expert_copy_group(self.expert_group_name)
        for parameter in self.parameters():
            parameter.sequence_parallel = layout.tensor > 1  # type: ignore[attr-defined]
        for parameter in self.experts.parameters():
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            mark_expert(parameter, self.expert_group_name, copies)


class HostedMoELayer(MarkedMoELayer, AutoEPMoELayer):
    """The same under DeepSpeed's type, whose instances the engine looks for.

    DeepSpeed's constructor is bypassed: it would build experts and a router of its own. Of its two hosts of
    experts this is the one that ZeRO 3 takes.
    """

    def __init__(self, *args: Any) -> None:
        MarkedMoELayer.__init__(self, *args)
        self.num_local_experts = self.num_experts // self.ep_size
        self.ep_group_name = self.expert_group_name

    def set_deepspeed_parallelism(
        self, use_data_before_expert_parallel_: bool = False, folding_group_handles: object = None
    ) -> None:
        """The groups exist already; DeepSpeed calls this to have them made."""


def hosted_layer_factory(
    config: MoEConfig, context: StepContext, groups: ParallelGroups, layout: Layout
) -> Callable[[LayerShape], MoELayer]:
    """What `model` calls for each MoE block."""
    host = MarkedMoELayer if "experts" in config.frozen else HostedMoELayer
    return lambda shape: host(config, shape, context, groups, layout)
