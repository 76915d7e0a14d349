"""DeepSpeed's ZeRO: what of a parameter lies where, and the marks by which it knows an expert.

Seen with: DeepSpeed 0.19.8, where an entry does not say otherwise.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch.distributed as dist
from deepspeed.ops.adam import cpu_adam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero import partitioned_param_coordinator, utils
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from deepspeed.utils import safe_set_local_fp32_param
from torch import Tensor, nn
from torch.nn import functional

from megamoe.compat import replaced


def mark_expert(parameter: nn.Parameter, group_name: str, copies: dist.ProcessGroup) -> None:
    """Mark a parameter as an expert's: a rank's own, averaged over the group `copies` only.

    Reason: DeepSpeed knows experts by these attributes, which its own MoE layers set.
    Without it: experts that differ between ranks are averaged as if they were the same.
    Canary: test_deepspeed_zero.py::test_marks_of_experts
    """
    marked: Any = parameter
    marked.allreduce = False
    marked.group_name = group_name
    marked.model_parallel = True  # each rank's counts in the norm
    marked.ds_zero_placement_family = "autoep_expert"
    marked.ds_zero_partition_group_name = group_name
    # ZeRO 3 cuts a parameter over this group; without a host in the model it would not look it up.
    marked.ds_zero_partition_process_group = copies


def know_optimizer(kind: type) -> None:
    """Let DeepSpeed partition optimizers of this class as it does those of PyTorch.

    Reason: it knows a list of classes, not their bases.
    Without it: every start prints a warning of an untested optimizer.
    Canary: test_deepspeed_zero.py::test_known_optimizers
    """
    if kind not in utils.ZERO_SUPPORTED_OPTIMIZERS:
        utils.ZERO_SUPPORTED_OPTIMIZERS.append(kind)


def cut(parameters: Sequence[nn.Parameter], filled: dict[str, Any], mpu: Any, known: Any = None) -> None:
    """Cut whole parameters over their ranks, as `deepspeed.initialize` does at ZeRO 3; collective.

    Each goes to the device, becomes that of the first rank of its group, and leaves this rank's slice there,
    or where `offload_param` says. filled: the dictionary for `deepspeed.initialize`. known: a parameter that
    was cut before with the same settings; None: there is none.

    Reason: `deepspeed.initialize` cuts a model that is whole on the device. `Init(module=...)` is public, but
        it opens the files of NVMe anew at each call; a parameter that is cut takes others along.
    Without it: a start at ZeRO 3 needs memory for the whole model, on the host and on the device.
    Canary: test_deepspeed_zero.py::test_parameters_are_cut_one_module_after_the_other
    """
    if known is None:
        group = mpu.get_data_parallel_group()
        Init(nn.ParameterList(parameters), data_parallel_group=group, config_dict_or_path=filled, mpu=mpu)
    else:
        known.convert_to_zero_parameters(param_list=parameters)


def silence_output_type_warning() -> None:
    """Leave out ZeRO 3's warning that a module returns something other than tensors, tuples, lists or dicts.

    Reason: a router's parts return dataclasses (`Pairs`, `Routing`), whose tensors ZeRO 3 does not see. Their
        parameters are gathered all the same: tests/distributed/parity/test_zero3.py shows it.
    Without it: every run at ZeRO 3 begins with a warning that tells a user of nothing to do.
    Canary: test_deepspeed_zero.py::test_outputs_that_zero3_does_not_know
    """
    utils.warned = True


@contextmanager
def ranks_agree() -> Iterator[None]:
    """Inside, ZeRO 3 does not compare the order of its parameters over the ranks.

    Reason: it broadcasts the numbers of the first rank and compares them. Fake tensors hold no numbers.
    Without it: a simulated step at ZeRO 3 fails, as if the ranks disagreed.
    Canary: test_deepspeed_zero.py::test_ranks_are_compared
    """
    with replaced(partitioned_param_coordinator, assert_ints_same_as_other_ranks=lambda numbers: None):
        yield


@contextmanager
def host_adam_without_kernel() -> Iterator[None]:
    """Inside, DeepSpeed's Adam on the host makes its moments and updates nothing.

    Reason: its kernel is compiled at its first use, and reads addresses, which fake tensors do not have.
    Without it: an offloaded optimizer cannot be simulated.
    Canary: test_deepspeed_zero.py::test_host_adam_without_kernel
    """
    names = ("create_adam", "adam_update", "destroy_adam")
    kernel = SimpleNamespace(**dict.fromkeys(names, lambda *arguments: None))
    builder = SimpleNamespace(load=lambda: kernel)
    with replaced(cpu_adam, CPUAdamBuilder=lambda: builder):
        yield


def is_cut(parameter: Tensor) -> bool:
    """Return whether ZeRO 3 has cut the parameter over ranks.

    Reason: ZeRO 3 replaces a parameter's data by nothing and keeps this rank's slice in attributes.
    Without it: checkpoints and projections would find empty parameters.
    Canary: test_deepspeed_zero.py::test_parameters_at_zero3
    """
    return hasattr(parameter, "ds_id")


def held_tensors(parameter: Any) -> list[Tensor]:
    """Return what this rank holds of a parameter: its data, and at ZeRO 3 this rank's slice.

    Reason: `ds_tensor` has no public name.
    Without it: the memory of slices could not be told from other memory.
    Canary: test_deepspeed_zero.py::test_parameters_at_zero3
    """
    return [parameter.data, parameter.ds_tensor] if is_cut(parameter) else [parameter.data]


def is_absent(parameter: Tensor) -> bool:
    """Return whether ZeRO 3 has cut the parameter and it is not gathered now.

    Reason: GatheredParameters frees at its end what was gathered by somebody else.
    Without it: a parameter that is in use would be freed, or none would be gathered.
    Canary: test_deepspeed_zero.py::test_parameters_at_zero3
    """
    return getattr(parameter, "ds_status", None) is ZeroParamStatus.NOT_AVAILABLE


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return a parameter's shape, though ZeRO 3 may have emptied it.

    Reason: an emptied parameter's own shape is [0].
    Without it: a checkpoint at ZeRO 3 would hold the wrong shapes.
    Canary: test_deepspeed_zero.py::test_parameters_at_zero3
    """
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def slice_of(parameter: Any) -> tuple[int, int]:
    """(first element, number of elements) of this rank's slice of a cut parameter, flattened.

    The last ranks' slices may be short or empty.

    Reason: DeepSpeed pads the slices to one size and does not say which elements are real.
    Without it: a checkpoint at ZeRO 3 would hold padding.
    Canary: test_deepspeed_zero.py::test_parameters_at_zero3
    """
    each = parameter.ds_tensor.ds_numel
    start = min(dist.get_rank(parameter.ds_process_group) * each, parameter.ds_numel)
    return start, min(each, parameter.ds_numel - start)


def slice_values(parameter: Any) -> Tensor:
    """Return the elements of `slice_of`, flat, in the model's precision.

    Reason: `ds_tensor` has no public name.
    Without it: frozen weights could not be saved at ZeRO 3.
    Canary: test_deepspeed_zero.py::test_parameters_at_zero3
    """
    return parameter.ds_tensor.detach().view(-1).narrow(0, 0, slice_of(parameter)[1])


def set_sliced_master(parameter: Any, value: Tensor) -> None:
    """Set the fp32 master of a cut parameter to `value`, whole and the same on all ranks.

    Reason: DeepSpeed's safe_set_full_fp32_param reads past the value's end where the slices do not fill the
        last rank's.
    Without it: projecting such a parameter fails on the last rank.
    Canary: test_deepspeed_zero.py::test_the_last_slice_may_be_short
    """
    size, group = parameter.ds_tensor.ds_numel, parameter.ds_process_group
    padded = functional.pad(value.flatten(), (0, size * dist.get_world_size(group) - value.numel()))
    safe_set_local_fp32_param(parameter, padded.narrow(0, size * dist.get_rank(group), size))


@dataclass(frozen=True)
class FlatRange:
    """Elements [start, start + numel) of a flattened parameter lie at [at, ...) of a flat tensor."""

    parameter: nn.Parameter
    at: int
    start: int
    numel: int


def ranges_at_zero1(wrapper: Any) -> list[list[FlatRange]]:
    """Return what lies in this rank's flat tensor of each parameter group, at ZeRO 1 and 2.

    Reason: DeepSpeed writes it into its own checkpoints only. ZeRO 1 in bf16 and the others name their lists
        differently.
    Without it: masters and moments cannot be saved independently of the layout.
    Canary: test_deepspeed_zero.py::test_ranges_at_zero1
    """
    found = []
    groups = wrapper.bf16_groups if hasattr(wrapper, "bf16_groups") else wrapper.bit16_groups
    for parameters in groups:
        ranges = []
        for parameter in parameters:
            mapping = parameter._hp_mapping  # None where no element of it is in this rank's range
            if mapping is not None:
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                ranges.append(FlatRange(parameter, here.start, there.start, here.numel))
        found.append(ranges)
    return found


@dataclass(frozen=True)
class Slices:
    """How the replicas of a parameter share its flattened elements under ZeRO.

    starts: replica r holds the elements from starts[r] to starts[r + 1]. at: where this rank's begin in
    `flat`, the tensor that the optimizer steps on.
    """

    parameter: nn.Parameter
    flat: Tensor
    starts: list[int]
    at: int


def slices_at_zero1(wrapper: Any, optimizer: Any) -> Iterator[Slices]:
    """Yield how every parameter is shared at ZeRO 1 and 2, without round_robin_gradients.

    Reason: DeepSpeed puts a group's parameters one after the other and cuts them into equal partitions; it
        tells of this rank's part alone (`ranges_at_zero1`).
    Without it: each rank would have to tell the others what it holds.
    Canary: test_deepspeed_zero.py::test_slices_of_all_replicas
    """
    groups = wrapper.bf16_groups if hasattr(wrapper, "bf16_groups") else wrapper.bit16_groups
    for number, (parameters, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        (flat,) = group["params"]
        copies = wrapper.real_dp_process_group[number]
        ranks, rank, size = dist.get_world_size(copies), dist.get_rank(copies), flat.numel()
        before = 0
        for parameter in parameters:
            numel = parameter.numel()
            starts = [min(max(each * size - before, 0), numel) for each in range(ranks + 1)]
            yield Slices(parameter, flat, starts, max(0, before - rank * size))
            before += numel


def slices_at_zero3(wrapper: Any) -> Iterator[Slices]:
    """Yield how every parameter is shared at ZeRO 3, without offload.

    Reason: see `slices_at_zero1`; here each parameter is cut by itself.
    Without it: each rank would have to tell the others what it holds.
    Canary: test_deepspeed_zero.py::test_slices_of_all_replicas
    """
    for number, flat in enumerate(wrapper.fp32_partitioned_groups_flat):
        for parameter in wrapper.fp16_groups[number]:
            ranks, each = dist.get_world_size(parameter.ds_process_group), parameter.ds_tensor.ds_numel
            starts = [min(each * rank, parameter.ds_numel) for rank in range(ranks + 1)]
            yield Slices(parameter, flat, starts, wrapper.grad_position[wrapper.get_param_id(parameter)][1])


def ranges_at_zero3(wrapper: Any, values: bool = True) -> Iterator[tuple[Tensor, list[FlatRange]]]:
    """Yield each sub-group of ZeRO 3: its flat tensor, and what lies in it.

    What is kept on disk is in memory until the next sub-group is asked for; without `values` it is not read.

    Reason: DeepSpeed writes it into its own checkpoints only.
    Without it: masters and moments cannot be saved independently of the layout.
    Canary: test_deepspeed_zero.py::test_ranges_at_zero3
    """
    for number, flat in enumerate(wrapper.fp32_partitioned_groups_flat):
        on_disk = values and wrapper._swappable_optimizer_subgroup(number)
        if on_disk:
            wrapper._optimizer_states_and_gradient_swap_in(number)
        ranges = []
        for parameter in wrapper.fp16_groups[number]:
            start, numel = slice_of(parameter)
            at = wrapper.grad_position[wrapper.get_param_id(parameter)][1]
            ranges += [FlatRange(parameter, at, start, numel)] if numel else []
        yield flat, ranges
        if on_disk:
            wrapper._optimizer_states_and_gradient_swap_out(number)


class _GradientOwner(Protocol):
    """Takes the gradients of ZeRO 1 in bf16 from autograd to the update."""

    def take(self, parameter: nn.Parameter, group: int, place: int) -> None: ...

    def reduce(self) -> None: ...

    def step(self) -> None: ...

    def clear(self) -> None: ...


def is_zero1_in_bf16(optimizer: Any) -> bool:
    """Return whether the engine's optimiser is DeepSpeed's with fp32 gradients of a bf16 model.

    Reason: DeepSpeed chooses it by stage, dtype and settings, without a public name for the choice.
    Without it: the others, whose gradients are elsewhere, would be taken for it.
    Canary: test_deepspeed_zero.py::test_gradients_have_an_owner
    """
    return isinstance(optimizer, BF16_Optimizer) and bool(optimizer.immediate_grad_update)


def give_gradients_to(owner: _GradientOwner, engine: Any) -> None:
    """Let `owner` accumulate, reduce, apply and clear the gradients of the engine's optimiser.

    take: called for each parameter as soon as autograd has its gradient. reduce: called by the backward pass
    of a step's last micro batch. step, clear: in place of the optimiser's.

    Reason: the optimiser accumulates by two kernels, copies all gradients together, sums all of them on every
        rank, and computes norm, clipping and zeros on all of them, though a rank needs only its own part.
    Without it: of a model of 0.9 B parameters on 8 H100, by the roofline, 35 ms a step and not 12.
    Canary: test_deepspeed_zero.py::test_gradients_have_an_owner
    """
    optimizer = engine.optimizer

    def take(parameter: nn.Parameter, group: int, place: int, clear_lp_grads: bool) -> None:
        if parameter.grad is not None:
            owner.take(parameter, group, place)

    optimizer._update_hp_grad = take
    optimizer.clear_hp_grads = owner.clear
    optimizer.step = owner.step
    engine.buffered_allreduce_fallback = lambda *unused, **also_unused: owner.reduce()


def finish_step(optimizer: Any, norm: float, updates: Callable[[], None] | None) -> None:
    """Do what ZeRO 1 in bf16 does around an update: set the norm, link the moments, spread the new weights.

    updates: moves masters, moments and `parts_in_bf16`; None: the norm is not finite, and nothing moves.

    Reason: the norm and the flag of a step that was skipped are attributes of the optimiser, it finds moments
        by a function that begins with an underscore, and `update_lp_params` reads all masters once more.
    Without it: the engine reports no norm, and moments cannot be saved.
    Canary: test_deepspeed_zero.py::test_gradients_have_an_owner
    """
    optimizer.overflow = updates is None
    optimizer._global_grad_norm = float("inf") if updates is None else norm
    if updates is None:
        optimizer.clear_lp_grads()
        return
    updates()
    optimizer._lazy_init_hp_params_optimizer_state()
    with replaced(optimizer, fp32_groups_flat_partition=[]):  # which are in the parts already
        optimizer.update_lp_params()


def parts_in_bf16(optimizer: Any) -> dict[Tensor, Tensor]:
    """Return this rank's part of each group's flat weights in bf16, by its fp32 master, at ZeRO 1 in bf16.

    Reason: the attributes have no documentation.
    Without it: the update could not round the new masters while it has them.
    Canary: test_deepspeed_zero.py::test_gradients_have_an_owner
    """
    ranks = [dist.get_rank(group) for group in optimizer.real_dp_process_group]
    parts = [parts[rank] for parts, rank in zip(optimizer.bf16_partitioned_groups, ranks, strict=True)]
    return dict(zip(optimizer.fp32_groups_flat_partition, parts, strict=True))


def parameters_of_groups(optimizer: Any) -> list[list[nn.Parameter]]:
    """Return the model's parameters by group, in the order of the flat tensors.

    Reason: the attribute has no documentation.
    Without it: gradients would be reduced to the wrong parts.
    Canary: test_deepspeed_zero.py::test_gradients_have_an_owner
    """
    return optimizer.bf16_groups
