"""ZeRO with pipeline stages: weights that two stages hold, and the norm of the whole model's gradient.

Each stage has an engine of its own, whose collectives run over the ranks of the stage. Stages may have other
parameter groups (a stage without an MoE layer has no experts), so DeepSpeed's own norm, with a collective
for each group, would wait for ranks that never call it.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from megatron.core import parallel_state
from torch import Tensor, nn

from megamoe.compat.deepspeed_pipeline import accumulated_gradient, replace_norm
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import ModelParallelUnit


class ReplicatedWeights:
    """The weights of which the first and the last stage have a copy: a tied embedding, or that of MTP.

    Both copies get the sum of both gradients, so they stay equal bit for bit. They bear `is_replicated`, and
    on the last stage `counted_elsewhere`: the norm counts them once, and a checkpoint has them once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if getattr(p, "is_replicated", False)]
        # Of this rank's place in the first and in the last stage; None on the stages between.
        self._group = parallel_state.get_embedding_group(check_initialized=False)

    def sum_gradients(self, optimizer: Any) -> None:
        """Sum the accumulated gradients of both copies, before they are averaged over the replicas."""
        for parameter in self._parameters:
            gradient = accumulated_gradient(optimizer, parameter)
            # Not a send and a receive: on NCCL each stage's receive would wait for its own send to end.
            dist.all_reduce(gradient, group=self._group)


def use_norm_of_all_stages(optimizer: Any, layout: Layout) -> None:
    """Let DeepSpeed's optimizer at ZeRO 1 or 2 take the norm over all stages, in one collective.

    The sum of squares is over the world; each weight counts once.
    """

    def norm(gradients: Iterable[tuple[nn.Parameter, Tensor]], are_partitioned: bool) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=_device(optimizer))
        for parameter, gradient in gradients:
            if (times := _times_counted(parameter, are_partitioned, layout)) > 0:
                total += gradient.detach().double().square().sum().to(total.device) / times
        dist.all_reduce(total)
        return total.sqrt().float()

    replace_norm(optimizer, norm)


def _times_counted(parameter: nn.Parameter, is_partitioned: bool, layout: Layout) -> int:
    """Return on how many ranks the same values of a gradient are counted; 0: not on this rank."""
    if getattr(parameter, "counted_elsewhere", False):
        return 0
    if is_moe_param(parameter):
        return 1 if is_partitioned else layout.expert_copies
    is_cut = getattr(parameter, "tensor_model_parallel", False)
    if not is_cut and ModelParallelUnit.get_tensor_model_parallel_rank() != 0:
        return 0
    return 1 if is_partitioned else layout.replicas


def _device(optimizer: Any) -> torch.device:
    return next(p.device for group in optimizer.optimizer.param_groups for p in group["params"])
