"""The MoE layer as DeepSpeed expects it: expert parameters marked, inside a type that it recognises."""

from collections.abc import Callable
from typing import Any

from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer

from megamoe.compat.deepspeed_compat import expert_groups
from megamoe.compat.deepspeed_zero import mark_expert
from megamoe.config.schema import MoEConfig
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.part import StepContext
from megamoe.moe.process_groups import ParallelGroups
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import Groups, expert_group_name


class MarkedMoELayer(MoELayer):
    """Our layer with DeepSpeed's marks on its expert parameters, which name the group that shares them.

    It is used if the experts are frozen: for every recognised host of experts the engine requires an expert
    group in the optimiser. All other parameters of the layer are marked for `TensorParallelGradientSync` if
    tensor parallelism splits a micro batch's tokens.
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
        _, copies = expert_groups(self.expert_group_name)
        for parameter in self.parameters():
            parameter.sequence_parallel = layout.tensor > 1  # type: ignore[attr-defined]
        for parameter in self.experts.parameters():
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            mark_expert(parameter, self.expert_group_name, copies)


class DeepSpeedMoELayer(MarkedMoELayer, AutoEPMoELayer):
    """The same layer as a subclass of DeepSpeed's type, which the engine looks for.

    DeepSpeed's constructor is bypassed: it would build its own experts and router. DeepSpeed has two such
    types; ZeRO 3 supports this one.
    """

    def __init__(self, *args: Any) -> None:
        MarkedMoELayer.__init__(self, *args)
        self.num_local_experts = self.num_experts // self.ep_size
        self.ep_group_name = self.expert_group_name

    def set_deepspeed_parallelism(
        self, use_data_before_expert_parallel_: bool = False, folding_group_handles: object = None
    ) -> None:
        """Does nothing: DeepSpeed calls it to create groups, which already exist."""


def moe_layer_factory(
    context: StepContext, groups: Groups, layout: Layout
) -> Callable[[MoEConfig, LayerShape], MoELayer]:
    """Return the factory that `model` calls for each MoE layer, with its own configuration."""

    def make(config: MoEConfig, shape: LayerShape) -> MoELayer:
        host = MarkedMoELayer if "experts" in config.frozen else DeepSpeedMoELayer
        return host(config, shape, context, groups.layer, layout)

    return make
