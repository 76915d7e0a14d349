"""A callback that names the stages of the MoE layers in the traces of Nsight Systems and torch.profiler."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megamoe.registry import register
from megamoe.train.callbacks import Callback, TrainingRun

STAGES = ("router", "router.scorer", "router.score_function", "router.selector", "losses", "experts")


@register("callback", "ranges")
class Ranges(Callback):
    """Names the forward pass of each MoE layer `moe 2`, and its stages `moe 2 router.scorer` and so on.

    torch.profiler shows the names (`train.profiler.start_step`), Nsight Systems shows them as NVTX ranges:
    `nsys profile --trace=cuda,nvtx torchrun ...`.
    """

    @dataclass
    class Config:
        """nvtx: whether Nsight Systems sees the names too; needs a GPU."""

        nvtx: bool = False

    def on_train_begin(self, trainer: TrainingRun) -> None:
        """Put hooks around the layers and their stages."""
        for number, layer in trainer.model.moe_layers():
            self._name(layer, f"moe {number}")
            for stage in STAGES:
                self._name(layer.get_submodule(stage), f"moe {number} {stage}")

    def _name(self, module: nn.Module, name: str) -> None:
        open_ranges: list[Callable[..., Any]] = []

        def begin(*unused: Any) -> None:
            named = torch.profiler.record_function(name)
            named.__enter__()
            open_ranges.append(named.__exit__)
            if self.config.nvtx:
                torch.cuda.nvtx.range_push(name)

        def end(*unused: Any) -> None:
            if self.config.nvtx:
                torch.cuda.nvtx.range_pop()
            open_ranges.pop()(None, None, None)

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
