"""DeepSpeed: its start, its process groups, and the engine around an optimiser.

Seen with: DeepSpeed 0.19.8, where an entry does not say otherwise.
"""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.utils import groups
from torch import Tensor

from megamoe.compat import replaced


def skip_shared_memory_op() -> None:
    """Let DeepSpeed's CPU backend start without its shared-memory all-reduce.

    Reason: the backend compiles it at the first start, and only inference uses it.
    Without it: a user's first start takes 30 to 60 s longer, and a killed run leaves memory in /dev/shm.
    Canary: test_deepspeed.py::test_shared_memory_op
    """
    # By its full name: `import deepspeed.comm.torch as x` yields torch itself, which that package imports.
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]


def set_expert_groups(name: str, holders: dist.ProcessGroup, copies: dist.ProcessGroup) -> None:
    """Give DeepSpeed the experts' groups under the name that parameters bear as `group_name`.

    holders: ranks that hold all experts once, by which it sums the experts' part of the gradient norm, and
    which it calls expert-parallel. copies: ranks that hold the same experts, by which it averages gradients.

    Reason: its own groups lie within one tensor-parallel rank; ours may run over several.
    Without it: the engine fails with an assertion that the experts' group is not initialized.
    Canary: test_deepspeed.py::test_expert_groups
    """
    groups._EXPERT_PARALLEL_GROUP[name] = holders
    groups._EXPERT_DATA_PARALLEL_GROUP[name] = copies


def expert_groups(name: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return (holders, copies) of `set_expert_groups`.

    Reason: DeepSpeed's getters begin with an underscore.
    Without it: the groups would need a second registry beside DeepSpeed's.
    Canary: test_deepspeed.py::test_expert_groups
    """
    return groups._get_expert_parallel_group(name), groups._get_expert_data_parallel_group(name)


def forget_groups() -> None:
    """Let DeepSpeed forget every process group and the model-parallel unit that it was given.

    Reason: its groups outlive torch.distributed, unless it is ended through deepspeed.comm.
    Without it: a second run in the same process communicates over groups that were destroyed.
    Canary: test_deepspeed.py::test_groups_are_kept
    """
    for name, value in vars(groups).items():
        if name.isupper() and name.startswith("_"):
            setattr(groups, name, {} if isinstance(value, dict) else None)
    groups.mpu = None


def silence_memory_reports() -> None:
    """Let ZeRO 1 in bf16 be built without a report of the memory in use before and after each group.

    Reason: the reports are forced, and each collects garbage first.
    Without it: every start prints two blocks of lines for each parameter group.
    Canary: test_deepspeed.py::test_memory_reports_are_forced
    """
    bf16_optimizer.see_memory_usage = lambda *unused, **also_unused: None


def read_norm_once() -> None:
    """Let ZeRO 1 in bf16 combine the gradient norms of dense and expert parameters on the device.

    Reason: DeepSpeed reads each of them to the host, sends it back, and reads the sum; and the value by which
        it marks a norm that is not finite is copied to the device each time.
    Without it: the host waits eight times a step, here once.
    Canary: test_deepspeed.py::test_norm_is_read_piece_by_piece
    """
    utils.mask_nan_or_inf_with_val_inplace = _mark_not_finite
    bf16_optimizer.get_norm_with_moe_layers = _norm_with_experts


def _mark_not_finite(input: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
    input.masked_fill_(input.isfinite().logical_not_(), -1.0)


def _norm_with_experts(
    non_expert_norm: Any, mpu: Any, expert_tensors: dict[str, list[torch.Tensor]], norm_type: float = 2
) -> float:
    """Return the norm over all groups; -1 where one is not finite, as DeepSpeed's function answers."""
    norms = [torch.as_tensor(non_expert_norm, dtype=torch.float32)]
    for name, tensors in expert_tensors.items():
        group = groups._get_expert_parallel_group(name)
        norms.append(utils.get_global_norm_of_tensors(tensors, norm_type, mpu, moe_ep_group=group))
    norms_G = torch.stack([norm.float() for norm in norms])
    invalid = (norms_G.isfinite().logical_not_() | (norms_G < 0)).any()
    total = float(norms_G.pow(norm_type).sum().masked_fill_(invalid, math.nan))
    norm = total ** (1.0 / norm_type)
    return norm if math.isfinite(norm) else -1.0


def skip_gradient_buckets(engine: Any) -> None:
    """At ZeRO 0 on one rank, let the engine leave gradients where they are.

    Reason: there is nobody to sum with, but the engine copies all gradients into buckets and back.
    Without it: two more passes over all gradients in each step.
    Canary: test_deepspeed_zero.py::test_gradient_buckets
    """
    engine.enable_backward_allreduce = False


def set_grad_norm(optimizer: Any, norm: float) -> None:
    """Tell the engine the gradient norm of the step, for its `get_global_grad_norm`.

    Reason: at ZeRO 0 the engine reads `_global_grad_norm` of the optimiser after each step. (It also calls
        its `get_grads_for_reduction`, if there is one, for what to average instead of parameters' gradients.)
    Without it: the engine answers the norm of its own clipping, which is None where it is off.
    Canary: test_deepspeed_zero.py::test_what_the_engine_asks_an_optimizer
    """
    optimizer._global_grad_norm = norm


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimiser within DeepSpeed's, or `optimizer` itself at ZeRO 0.

    Reason: ZeRO's wrappers name it `optimizer`, without a public function for all of them.
    Without it: the learning rate cannot be set, and Adam's moments cannot be saved.
    Canary: test_deepspeed_zero.py::test_wrapped_optimizers
    """
    return getattr(optimizer, "optimizer", optimizer)


@contextmanager
def without_inner_steps(wrapper: Any) -> Iterator[None]:
    """Inside, a step of ZeRO's optimiser moves no weight, master or moment; all else it does as always.

    Reason: DeepSpeed has no way to skip a step that still clears gradients, swaps and updates the loss scale.
    Without it: a step that the skip policy refuses would be applied.
    Canary: test_deepspeed_zero.py::test_wrapped_optimizers
    """
    # The second steps on what ZeRO 3 leaves on the device where it offloads a part alone.
    inner = [wrapper.optimizer, getattr(wrapper, "backup_optimizer", None)]
    with ExitStack() as stack:
        for optimizer in inner:
            if optimizer is not None:
                stack.enter_context(replaced(optimizer, step=lambda *unused, **also_unused: None))
        yield


@contextmanager
def watching_overflow(optimizer: Any, report: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Context of a step in which `report` gets the gradients, by parameter group, if some are not finite.

    optimizer: DeepSpeed's at ZeRO 1, 2 or 3; this rank's parts are reported. With offload they lie beside the
        master weights.

    Reason: DeepSpeed returns infinity for the norm of such gradients, NaN ones too, and drops them at once.
    Seen with: DeepSpeed 0.19.8, where `_update_scale` is called between the two, and ZeRO 1 in bf16 drops
        them in `clear_hp_grads`.
    Without it: a message about a skipped step cannot say whether a gradient was NaN, nor where.
    Canary: test_deepspeed_zero.py::test_gradients_that_are_not_finite_are_reported
    """
    in_bf16 = isinstance(optimizer, bf16_optimizer.BF16_Optimizer)
    name = "clear_hp_grads" if in_bf16 else "_update_scale"
    plain = getattr(optimizer, name, None)
    if plain is None:
        yield
        return

    group_of = getattr(optimizer, "sub_group_to_group_id", {})  # ZeRO 3 counts parts of groups

    def watched(has_overflow: bool = False) -> Any:
        masters = getattr(optimizer, "single_partition_of_fp32_groups", None)  # ZeRO 1 and 2
        masters = getattr(optimizer, "fp32_partitioned_groups_flat", []) if masters is None else masters
        offloaded = {number: [master.grad] for number, master in enumerate(masters)}
        if in_bf16:
            held = dict(enumerate(optimizer.fp32_groups_gradients)) if optimizer.overflow else {}
        else:
            held = (getattr(optimizer, "averaged_gradients", None) or offloaded) if has_overflow else {}
        for number, gradients in held.items():
            for gradient in gradients or ():
                if gradient is not None:
                    report(group_of.get(number, number), gradient)
        return plain() if in_bf16 else plain(has_overflow)

    with replaced(optimizer, **{name: watched}):
        yield


def forget_gradients(optimizer: Any) -> None:
    """After a step that DeepSpeed skipped, drop the sums of its gradients.

    Reason: at ZeRO 1 and 2 with the optimiser offloaded it keeps sums that are not finite and adds to them.
    Without it: after one overflow every later step is skipped too.
    Canary: test_deepspeed_zero.py::test_skipped_gradients_are_kept
    """
    getattr(optimizer, "averaged_gradients", {}).clear()


def counts_steps_in_int(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether Adam's step count in the optimiser's state is an int and not a tensor.

    Reason: DeepSpeed's Adam for the CPU hands it to C++.
    Without it: the first step after a load fails.
    Canary: test_deepspeed.py::test_cpu_adam_counts_in_int
    """
    return type(optimizer).__name__ == "DeepSpeedCPUAdam"


class LossScaler:
    """The loss scale of ZeRO's fp16 optimiser. optimizer: the engine's; None: in other precisions, scale 1.

    Reason: DeepSpeed saves a dynamic scale's state in its own checkpoints only, and raises a bare Exception
        where the scale can fall no further.
    Without it: a resumed run begins with the initial scale and skips steps; the message is a traceback.
    Canary: test_deepspeed.py::test_loss_scaler
    """

    # Of a dynamic scaler; its other attributes come from the DeepSpeed file.
    STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    AT_MINIMUM = "loss scale already at minimum"

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def scale(self) -> float:
        """What a loss is multiplied with."""
        return 1.0 if self._optimizer is None else float(self._optimizer.loss_scale)

    @property
    def _dynamic(self) -> Any:
        """DeepSpeed's scaler, if its scale changes."""
        scaler = None if self._optimizer is None else self._optimizer.loss_scaler
        return scaler if scaler is not None and scaler.dynamic else None

    @property
    def can_fall(self) -> bool:
        """Whether an overflow lowers it."""
        scaler = self._dynamic
        return scaler is not None and bool(scaler.cur_scale > scaler.min_scale)

    def state(self) -> dict[str, float]:
        """Return what a dynamic scale has learned, empty for a static one."""
        scaler = self._dynamic
        return {} if scaler is None else {name: getattr(scaler, name) for name in self.STATE}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from `state`; a static scale stays as it is."""
        for name in state.keys() & self.STATE if self._dynamic is not None else ():
            setattr(self._dynamic, name, state[name])

    @classmethod
    def is_at_minimum(cls, error: Exception) -> bool:
        """Return whether the engine's step failed with this for want of a smaller scale."""
        return cls.AT_MINIMUM in str(error)
