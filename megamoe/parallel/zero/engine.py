"""The DeepSpeed engine behind a small interface: forward, backward, step, project, and batch sizes.

It makes training the same under every layout:
- the gradient comes from the caller's loss unchanged: the engine divides only by the data-parallel size (its
mean over ranks), not by the accumulation steps;
- an expert's gradient has the same scale as a dense one. It is summed over the ranks that hold the same
expert, and its rows already came from all ranks of its expert-parallel group, so it is the sum over all
data-parallel ranks. DeepSpeed (`_reduce_expert_gradients`) divides it by the data-parallel size, not by the
number of copies;
- the caller says which backward pass is the step's last, so the batch size may change between steps;
- clipping covers dense and expert parameters together at every stage (see `megamoe.optim.optimizers`);
- a step whose gradients are not finite, or that the caller skips, changes nothing (`step_skipped`);
- the pipeline stages have an engine each. Weights that two stages hold (a tied embedding) get the sum of
both gradients, and the norm is one of the whole model.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from megamoe.compat import deepspeed_compat
from megamoe.compat.deepspeed_pipeline import reduce_on_request
from megamoe.compat.deepspeed_zero import know_optimizer, silence_output_type_warning
from megamoe.config.schema import MuonConfig, RunConfig
from megamoe.errors import UserError
from megamoe.kernels.choice import Kernels
from megamoe.moe.part import Constraint
from megamoe.optim.matrices import step_rows
from megamoe.optim.muon import MasterWeightMuon, PartitionedMuon, Stage0Muon, is_of_muon
from megamoe.optim.optimizers import (
    MasterWeightAdamW,
    Stage0AdamW,
    WeightMean,
    adamw_options,
    note_not_finite,
    parameter_groups,
    skip_update,
    zero_optimizer,
)
from megamoe.parallel.consensus import CollectiveError, call_on_all
from megamoe.parallel.gradient_sync import TensorParallelGradientSync
from megamoe.parallel.launch import World
from megamoe.parallel.pipeline.links import StageLinks
from megamoe.parallel.process_groups import ModelParallelUnit, groups_of
from megamoe.parallel.zero.deepspeed_config import ParallelPlan
from megamoe.parallel.zero.matrix_exchange import MatrixExchange, split_weights
from megamoe.parallel.zero.partition import DTYPES, Partition
from megamoe.parallel.zero.pipeline import ReplicatedWeights, use_norm_of_all_stages
from megamoe.parallel.zero.scattered_gradients import ScatteredGradients
from megamoe.parallel.zero.separate_gradients import SeparateGradients
from megamoe.parallel.zero.shards import Shard, gathered, optimizer_shards, set_master, set_weight

Value = TypeVar("Value")


class Engine:
    """A model under DeepSpeed: ZeRO, expert parallelism, mixed precision.

    model: on the CPU in fp32; at ZeRO 3 a `Partition` may have cut it. plan: the layout and ZeRO settings.
    filled: the dictionary from `fill_in` for `deepspeed.initialize`. kernels: of the update. step_skipped:
    whether the last step left weights and moments unchanged. weight_mean: with `optimizer.ema`.
    """

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        world: World,
        plan: ParallelPlan,
        filled: dict[str, Any],
        kernels: Kernels,
    ) -> None:
        self.world = world
        self.layout, self.stage, self.precision = plan.layout, plan.stage, plan.precision
        self.groups = groups_of(plan.layout)
        self.step_skipped = self._is_last = False
        self.weight_mean = None if config.optimizer.ema is None else WeightMean(config.optimizer.ema)
        self._scattered: ScatteredGradients | None = None
        self.dtype = DTYPES[plan.precision]
        self.hidden_size = config.model.hidden_size
        # The ranks over which the positions of hidden states are spread between blocks.
        self.sequence_shards = self.layout.context * (self.layout.tensor if config.parallel.sequence else 1)
        self.micro_batch_size = config.train.micro_batch_size
        if self.stage == 0 and self.precision == "bf16":
            _round_parameters(model)
        if self.stage == 3:
            silence_output_type_warning()
            Partition(filled, plan.precision)(model)  # what is not cut yet
        model.to(world.device)
        unit, self._gradient_sync = ModelParallelUnit(), None
        if self.layout.tensor > 1:
            self._gradient_sync = TensorParallelGradientSync(model, unit.get_tensor_model_parallel_group())
        groups = self._on_all_stages(lambda: parameter_groups(model, config.optimizer, config.model))
        of_muon = {parameter for group in groups if is_of_muon(group) for parameter in group["params"]}
        optimizer = _build_optimizer(config, groups, plan, world, kernels)
        know_optimizer(type(optimizer))
        deepspeed_compat.silence_memory_reports()
        deepspeed_compat.read_norm_once()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notices for the libraries' own developers
            with _refusals(config.parallel.deepspeed):
                self._engine, *_ = deepspeed.initialize(
                    model=model, optimizer=optimizer, config=filled, mpu=unit, dist_init_required=False
                )
        if config.optimizer.name == "muon":
            self._use_muon(config.optimizer.muon, of_muon)
        if self.layout.pipeline > 1:
            self._replicas = ReplicatedWeights(model)
            if self.stage > 0:
                use_norm_of_all_stages(self._engine.optimizer, self.layout)
            # At ZeRO 2 the gradients are reduced in each backward pass.
            if self.stage < 2:
                reduce_on_request(self._engine)
        elif ScatteredGradients.serves(self._engine.optimizer, world.device, self.layout.tensor):
            section = filled.get("zero_optimization", {})
            self._scattered = ScatteredGradients(self._engine, section, config.optimizer.grad_clip, kernels)
        scaled = self._engine.optimizer if self.precision == "fp16" else None
        self.loss_scaling = deepspeed_compat.LossScaler(scaled)
        if self.stage == 0 and world.size == 1:
            deepspeed_compat.skip_gradient_buckets(self._engine)
        takes_turns = config.train.in_flight == 2
        self._separate = SeparateGradients(model, self._accumulate) if takes_turns else None

    def _on_all_stages(self, action: Callable[[], Value]) -> Value:
        """Return what `action` returns; an error that one pipeline stage alone has is raised on all."""
        return call_on_all(action) if self.layout.pipeline > 1 else action()

    def _use_muon(self, config: MuonConfig, chosen: set[nn.Parameter]) -> None:
        """Tell Muon where the matrices lie. chosen: the parameters that it updates."""
        optimizer: Any = self.inner_optimizer
        held = (self.model, self.layout, self.stage, self._engine.optimizer, optimizer, chosen)
        weights = self._on_all_stages(lambda: list(split_weights(*held)))
        in_fp32 = config.precision == "fp32" or (config.precision == "auto" and self.precision == "fp32")
        dtype = torch.float32 if in_fp32 else torch.bfloat16
        optimizer.muon.solver = MatrixExchange(
            weights, self.layout, self.groups.stage, step_rows(config), dtype
        )

    @property
    def pipeline_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.layout.pipeline_rank(self.world.rank)

    @property
    def links(self) -> StageLinks:
        """The links to the stages before and after."""
        assert self.groups.links is not None, "there is one stage"
        return self.groups.links

    @property
    def model(self) -> Any:
        """The model without DeepSpeed's wrapper."""
        return self._engine.module

    @property
    def data_group(self) -> dist.ProcessGroup:
        """The ranks whose micro batches form the batch."""
        return self.groups.data

    @property
    def inner_optimizer(self) -> torch.optim.Optimizer:
        """The torch optimiser, inside ZeRO's wrapper or without one."""
        return deepspeed_compat.inner_optimizer(self._engine.optimizer)

    def set_accumulation(self, accumulation: int) -> None:
        """Set the micro batches per rank of the next step."""
        self._engine.set_train_batch_size(self.micro_batch_size * self.layout.replicas * accumulation)

    def forward(self, **inputs: Any) -> Any:
        """Return the model's output."""
        return self._engine(**inputs)

    def backward(self, loss: Tensor, last: bool, completes: bool | None = None) -> None:
        """Accumulate the gradient of `loss`; after the step's last pass it is averaged over ranks, with
        pipeline stages in `finish_gradients`.

        completes: whether it is the last pass for the parameters that it reaches, which are those of one of a
        stage's chunks; default: as `last`.
        """
        self._set_last(last, completes)
        self._engine.backward(loss, scale_wrt_gas=False)

    def _set_last(self, last: bool, completes: bool | None = None) -> None:
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        if self._gradient_sync is not None:
            self._gradient_sync.last = last if completes is None else completes

    def forward_in_flight(self, place: int, **inputs: Any) -> Any:
        """Return the model's output for the first (0) or second (1) of two micro batches in flight."""
        assert self._separate is not None, "train.in_flight is 1"
        # DeepSpeed prepares the backward pass once, by hooks on the output of its own forward.
        model = self._engine if place == 0 else self.model
        with self._separate.of(place):
            return model(**inputs)

    def backward_in_flight(self, losses: list[Tensor], last: bool) -> None:
        """Accumulate the gradients of both micro batches in one backward pass; `last`: see `backward`."""
        assert self._separate is not None, "train.in_flight is 1"
        self._is_last = last
        self.backward(self._separate.joined(losses), last)

    def _accumulate(self, parameter: nn.Parameter, gradients: list[Tensor]) -> None:
        """Give a parameter the gradients of both micro batches, as two backward passes would.

        At ZeRO 2, which reduces what a parameter gets once in a backward pass, it gets their sum.
        """
        if self.stage == 2:
            gradients = [gradients[0] + gradients[1]] if len(gradients) > 1 else gradients
        for number, gradient in enumerate(gradients, 1):
            self._set_last(self._is_last and number == len(gradients))
            torch.autograd.backward([parameter], [gradient])

    def finish_gradients(self) -> None:
        """After the last pass of a pipeline stage, sum the gradients of weights that another stage holds too,
        and average all over the replicas. Both wait for other stages, so this one must have sent its own.
        """
        self._replicas.sum_gradients(self._engine.optimizer)
        if self.stage < 2:
            self._engine.allreduce_gradients()

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in `backward`, so that small gradients do not underflow in fp16; 1
        otherwise.
        """
        return self.loss_scaling.scale

    def gradient_squares(self) -> Tensor | None:
        """Return what this rank adds to the sum of squares that `step` needs, an fp64 scalar on the device.

        None: `step` needs none, because the optimizer computes the norm itself. Call it after the last
        backward pass.
        """
        return None if self._scattered is None else self._scattered.own_squares()

    def step(self, lr: float, apply_update: bool = True, squares: float | None = None) -> float:
        """Clip, update the weights and clear the gradients; return the gradient norm before clipping.

        squares: the sum of `gradient_squares` over all ranks, where it is not None. Without `apply_update`,
        or if the norm is not finite, weights and moments do not change; see `step_skipped`.

        Raises:
            CollectiveError: in fp16, if gradients overflow at the smallest loss scale.
        """
        if self._scattered is not None:
            assert squares is not None, "the sum of squares of the gradients is missing"
            self._scattered.use_squares(squares)
        for group in self.inner_optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        if self._gradient_sync is not None:
            self._gradient_sync.check_all_summed()
        try:
            with nullcontext() if apply_update else skip_update(self._engine.optimizer), self._watching():
                self._engine.step()
        except Exception as error:  # DeepSpeed's dynamic scale has no narrower type
            if not deepspeed_compat.LossScaler.is_at_minimum(error):
                raise
            raise CollectiveError(
                f"fp16: gradients overflow at the smallest loss scale, {self.loss_scale:g} (fp16."
                "min_loss_scale of the DeepSpeed file); lower optimizer.lr, or train in bf16"
            ) from None
        # A norm that is not finite: DeepSpeed skips the step and returns inf; our optimiser returns the norm.
        norm = float(self._engine.get_global_grad_norm())
        self.step_skipped = not apply_update or not math.isfinite(norm)
        if not math.isfinite(norm):
            deepspeed_compat.forget_gradients(self._engine.optimizer)
        return norm

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Note in `not_finite` the parameter groups whose gradients are not finite on this rank."""
        self.not_finite = {}
        if isinstance(self.inner_optimizer, Stage0AdamW):
            yield
            self.not_finite = self.inner_optimizer.not_finite
            return
        groups = self.inner_optimizer.param_groups

        def note(number: int, gradient: Tensor) -> None:
            note_not_finite(self.not_finite, groups[number]["name"], gradient)

        with deepspeed_compat.watching_overflow(self._engine.optimizer, note):
            yield

    @torch.no_grad()
    def project(self, constraints: list[Constraint]) -> None:
        """Replace each parameter by its projection, in full precision if it has a master copy.

        Collective at ZeRO 1, 2 and 3, which partition the masters.
        """
        for parameter, projection in constraints:
            if self.stage == 0:
                master = self.inner_optimizer.master_of(parameter)  # type: ignore[attr-defined]
                value = projection(master.float())
                master.copy_(value)
            else:
                value = projection(safe_get_full_fp32_param(parameter))
                set_master(parameter, value)
            set_weight(parameter, value)

    def gathered(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Context in which parameters are whole and read-only; collective at ZeRO 3, no operation below."""
        return gathered(parameters)

    def optimizer_shards(self, values: bool = True) -> Iterator[Shard]:
        """Return this rank's weights and moments by parameter group.

        values: without them, tensors that are on disk stay there.
        """
        return optimizer_shards(self._engine.optimizer, self.inner_optimizer, self.stage, values)

    def average_weights(self) -> None:
        """Take the weights into their exponential mean, if there is one; after all that changes them."""
        if self.weight_mean is not None:
            for shard in self.optimizer_shards():
                self.weight_mean.update(shard.tensors)

    def train(self, mode: bool) -> None:
        """Set training or evaluation mode."""
        self._engine.train(mode)


@contextmanager
def _refusals(path: str | None) -> Iterator[None]:
    """Raise a UserError with what DeepSpeed says of its file where it asserts, or raises a bare Exception."""
    try:
        yield
    except Exception as error:
        if path is None or type(error) not in (AssertionError, ValueError, Exception):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: DeepSpeed refuses it: {reason[:200]}") from error


def _build_optimizer(
    config: RunConfig, groups: list[dict[str, Any]], plan: ParallelPlan, world: World, kernels: Kernels
) -> torch.optim.Optimizer:
    options = adamw_options(config.optimizer)
    if plan.stage == 0:
        clip, decoupled = config.optimizer.grad_clip, config.optimizer.name != "adam"
        if config.optimizer.name == "muon":
            of_muon = MasterWeightMuon if plan.precision == "bf16" else Stage0Muon
            return of_muon(groups, clip, config.optimizer.muon, kernels=kernels, **options)
        kind = MasterWeightAdamW if plan.precision == "bf16" else Stage0AdamW
        return kind(groups, clip, kernels=kernels, decoupled_weight_decay=decoupled, **options)
    if plan.offload.optimizer != "none" and world.device.type == "cuda":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        del options["fused"]
        return DeepSpeedCPUAdam(groups, adamw_mode=config.optimizer.name == "adamw", **options)
    if config.optimizer.name == "muon":
        return PartitionedMuon(groups, config.optimizer.muon, kernels=kernels, **options)
    return zero_optimizer(config.optimizer, groups, kernels)


def _round_parameters(model: nn.Module) -> None:
    """Convert parameters to bf16; buffers (rotary frequencies) stay fp32, as in the engine's own cast."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
