"""The DeepSpeed engine behind five verbs: forward, backward, step, and the sizes of a batch.

What it settles, so that training is the same under every layout:
- the caller's loss is the gradient's source as it stands: the engine divides by nothing but the
  data-parallel size (its mean over ranks), never by the accumulation steps;
- the accumulation boundary is told, not counted, so a batch may change its size between steps;
- clipping is over dense and expert parameters together at every stage (see `optimizer`).
"""

import warnings
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import Tensor, nn

from megamoe.config.schema import RunConfig
from megamoe.moe.part import Constraint
from megamoe.parallel.apex_adamw import zero_adamw
from megamoe.parallel.deepspeed_config import (
    Precision,
    fill_in,
    offloads_optimizer,
    read_deepspeed_config,
    resolve_precision,
    zero_stage,
)
from megamoe.parallel.groups import ModelParallelUnit, data_group
from megamoe.parallel.launch import World
from megamoe.parallel.layout import Layout
from megamoe.parallel.optimizer import MasterWeightAdamW, Stage0AdamW, adamw_options, parameter_groups
from megamoe.parallel.tensor_sums import TensorSums


class Engine:
    """A model under DeepSpeed: ZeRO, expert parallelism, mixed precision."""

    def __init__(self, config: RunConfig, model: nn.Module, world: World, accumulation: int) -> None:
        content = read_deepspeed_config(config.parallel.deepspeed)
        self.world = world
        self.layout = Layout.of(config.parallel, world.size)
        self.stage = zero_stage(content)
        self.precision: Precision = resolve_precision(config, content)
        self.offloads = offloads_optimizer(content)
        self.micro_batch_size = config.train.micro_batch_size
        filled = fill_in(config, content, self.layout.data, accumulation)
        if self.stage == 0 and self.precision == "bf16":
            _round_parameters(model)
        model.to(world.device)
        unit = ModelParallelUnit()
        tensor_group = unit.get_tensor_model_parallel_group()
        self._tensor_sums = TensorSums(model, tensor_group) if self.layout.tensor > 1 else None
        optimizer = _build_optimizer(config, model, self.stage, self.precision, self.offloads, world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' notices to their own developers
            self._engine, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=filled, mpu=unit, dist_init_required=False
            )

    @property
    def model(self) -> nn.Module:
        """The model, as it was given."""
        module: nn.Module = self._engine.module
        return module

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks whose micro batches together are the batch."""
        return data_group()

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimiser, under ZeRO's wrapper or by itself."""
        optimizer = self._engine.optimizer
        inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
        return inner

    def set_accumulation(self, accumulation: int) -> None:
        """Micro batches per rank in the coming step."""
        self._engine.set_train_batch_size(self.micro_batch_size * self.layout.data * accumulation)

    def forward(self, last: bool, **inputs: Any) -> Any:
        """The model's output; `last`: whether this micro batch completes the step."""
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        if self._tensor_sums is not None:
            self._tensor_sums.last = last
        return self._engine(**inputs)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`; after the last micro batch it is averaged over ranks."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, lr: float) -> float:
        """Clip, update the weights, clear the gradients; returns the gradient norm before clipping."""
        for group in self.inner_optimizer.param_groups:
            group["lr"] = lr
        if self._tensor_sums is not None:
            self._tensor_sums.check_all_summed()
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        return float(norm) if norm is not None else float("nan")

    @torch.no_grad()
    def project(self, constraints: list[Constraint]) -> None:
        """Replace each parameter by its projection, in full precision where it has a master copy.

        Collective at ZeRO 1 and 2, where a master is spread over ranks.
        """
        for parameter, projection in constraints:
            if self.stage == 0:
                master = self.inner_optimizer.master_of(parameter)  # type: ignore[attr-defined]
                value = projection(master.float())
                master.copy_(value)
            else:
                value = projection(safe_get_full_fp32_param(parameter))
                safe_set_full_fp32_param(parameter, value)
            parameter.copy_(value)

    def train(self, mode: bool) -> None:
        """Training or evaluation mode."""
        self._engine.train(mode)


def _build_optimizer(
    config: RunConfig, model: nn.Module, stage: int, precision: Precision, offload: bool, world: World
) -> torch.optim.Optimizer:
    groups = parameter_groups(model, config.optimizer)
    options = adamw_options(config.optimizer)
    if stage == 0:
        kind = MasterWeightAdamW if precision == "bf16" else Stage0AdamW
        return kind(groups, grad_clip=config.optimizer.grad_clip, **options)
    if offload and world.device.type == "cuda":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        del options["fused"]
        cpu_adam: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        return cpu_adam
    return zero_adamw(config.optimizer, groups, options)


def _round_parameters(model: nn.Module) -> None:
    """Parameters to bf16; buffers (rotary frequencies) stay fp32, as the engine's own cast leaves them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
