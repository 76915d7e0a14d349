"""Canaries of DeepSpeed's engine and ZeRO, on the smallest model and one rank."""

import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero import (
    partition_parameters,
    partitioned_param_coordinator,
    stage3,
    stage_1_and_2,
    utils,
)
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor, nn

from megamoe.compat import deepspeed_zero, replaced
from megamoe.compat.deepspeed_compat import (
    forget_gradients,
    inner_optimizer,
    watching_overflow,
    without_inner_steps,
)
from megamoe.compat.deepspeed_zero import (
    FlatRange,
    is_zero1_in_bf16,
    ranges_at_zero1,
    ranges_at_zero3,
    slices_at_zero1,
    slices_at_zero3,
)
from megamoe.kernels.adamw import AdamW
from megamoe.kernels.choice import Kernels
from megamoe.optim.optimizers import Stage0AdamW
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import ModelParallelUnit, start_groups
from megamoe.parallel.zero.deepspeed_config import fill_in, resolve_parallel
from megamoe.parallel.zero.engine import Engine
from megamoe.parallel.zero.scattered_gradients import ScatteredGradients
from tests.support.ranks.runs import ds_config
from tests.support.tiny import VOCABULARY, tiny, tiny_engine

LR = 0.01
SIXTEEN = "moe.expert_ffn_hidden_size=16"  # PyTorch's product in bf16 wants strides of 16 bytes


def built(file: str) -> tuple[Engine, Any]:
    """Ours and DeepSpeed's."""
    config = tiny(f"parallel.deepspeed={ds_config(file)}", SIXTEEN)
    engine = tiny_engine(config)
    engine.train(True)
    return engine, engine._engine


def backward(engine: Engine, scale: float = 1.0) -> None:
    text = torch.arange(16).view(2, 8) % VOCABULARY
    positions = torch.arange(8).expand_as(text)
    losses = engine.forward(tokens_BS=text, position_ids_BS=positions, labels_BS=text.roll(-1, 1))
    engine.backward(losses.mean() * scale, last=True)


def weights_of(engine: Engine) -> list[Tensor]:
    parameters = list(engine.model.parameters())
    with engine.gathered(parameters):
        return [parameter.detach().clone() for parameter in parameters]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_gradient_buckets(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, inner = built("zero0_fp32")
    copied: list[bool] = []
    monkeypatch.setattr(inner, "buffered_allreduce_fallback", lambda *unused, **also: copied.append(True))
    backward(engine)
    assert not copied
    inner.enable_backward_allreduce = True
    backward(engine)
    assert copied, "DeepSpeed copies no gradients on one rank any more"


def test_what_the_engine_asks_an_optimizer(one_rank: None) -> None:
    engine, inner = built("zero0_fp32")
    optimizer = inner_optimizer(inner.optimizer)
    assert isinstance(optimizer, Stage0AdamW) and optimizer is inner.optimizer
    backward(engine)
    assert engine.step(LR) == optimizer.grad_norm > 0
    source = inspect.getsource(deepspeed_engine.DeepSpeedEngine)
    assert "self.optimizer.get_grads_for_reduction()" in source  # of the bf16 masters


@pytest.mark.parametrize("file", ["zero1_bf16", "zero2_fp32", "zero3_fp32"])
def test_wrapped_optimizers(one_rank: None, file: str) -> None:
    engine, inner = built(file)
    assert isinstance(inner_optimizer(inner.optimizer), torch.optim.Optimizer)
    assert inner_optimizer(inner.optimizer) is not inner.optimizer
    before = weights_of(engine)
    with without_inner_steps(inner.optimizer):
        backward(engine)
        assert engine.step(LR) > 0
    assert same(weights_of(engine), before)
    backward(engine)
    engine.step(LR)
    assert not same(weights_of(engine), before)


@pytest.mark.parametrize("grad_clip", [0.05, 0.0])
def test_gradients_have_an_owner(one_rank: None, grad_clip: float) -> None:
    """Two steps, of which one has a norm that is not finite: the weights and the norm are DeepSpeed's."""
    found = []
    for own in (False, True):
        config = tiny(
            f"parallel.deepspeed={ds_config('zero1_bf16')}", f"optimizer.grad_clip={grad_clip}", SIXTEEN
        )
        engine = tiny_engine(config)
        engine.train(True)
        inner = engine._engine
        assert is_zero1_in_bf16(inner.optimizer) and "step" not in vars(inner.optimizer)
        if own:
            engine._scattered = ScatteredGradients(inner, {}, grad_clip, Kernels())
        norms = []
        for scale in (1.0, float("nan"), 0.5):
            backward(engine, scale)
            if own and math.isfinite(scale):
                assert inner.optimizer.fp32_groups_gradient_flat_partition[0].any()
            squares = engine.gradient_squares()
            assert (squares is not None) == own
            norms.append(engine.step(LR, squares=None if squares is None else float(squares)))
            assert engine.step_skipped == math.isnan(scale)
        found.append((weights_of(engine), norms))
    (expected, norms), (weights, own_norms) = found
    assert own_norms == pytest.approx(norms, rel=1e-5)
    for one, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)


def test_known_optimizers() -> None:
    optimizer = AdamW([nn.Parameter(torch.ones(1))])
    known = [each for each in utils.ZERO_SUPPORTED_OPTIMIZERS if each is not AdamW]
    with replaced(utils, ZERO_SUPPORTED_OPTIMIZERS=known):
        assert not utils.is_zero_supported_optimizer(optimizer)
        deepspeed_zero.know_optimizer(AdamW)
        assert utils.is_zero_supported_optimizer(optimizer)


def test_ranks_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = partitioned_param_coordinator
    compared: list[list[int]] = []
    source = inspect.getsource(coordinator.PartitionedParameterCoordinator.reset_step)
    assert "assert_ints_same_as_other_ranks([" in source
    monkeypatch.setattr(coordinator, "assert_ints_same_as_other_ranks", compared.append)
    with deepspeed_zero.ranks_agree():
        coordinator.assert_ints_same_as_other_ranks([1])
    coordinator.assert_ints_same_as_other_ranks([2])
    assert compared == [[2]]


def test_host_adam_without_kernel() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    with deepspeed_zero.host_adam_without_kernel():
        optimizer = DeepSpeedCPUAdam([weight])
        optimizer.step()
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
    assert weight.eq(1).all()


def test_marks_of_experts(one_rank: None) -> None:
    parameter, copies = nn.Parameter(torch.ones(2)), object()
    assert not is_moe_param(parameter) and not is_model_parallel_parameter(parameter)
    deepspeed_zero.mark_expert(parameter, "ep_size_1", copies)  # type: ignore[arg-type]
    assert is_moe_param(parameter) and is_model_parallel_parameter(parameter)
    assert parameter.group_name == "ep_size_1"  # type: ignore[attr-defined]
    read_by = {
        "ds_zero_placement_family": deepspeed_engine,
        "ds_zero_partition_group_name": stage3,
        "ds_zero_partition_process_group": partition_parameters,
    }
    for mark, module in read_by.items():
        assert hasattr(parameter, mark) and f'getattr(param, "{mark}"' in inspect.getsource(module)
    assert '"autoep_expert"' in inspect.getsource(deepspeed_engine)


def test_parameters_at_zero3(one_rank: None) -> None:
    engine, _ = built("zero3_fp32")
    for parameter in engine.model.parameters():
        assert deepspeed_zero.is_cut(parameter)
        held = deepspeed_zero.held_tensors(parameter)
        assert sum(tensor.numel() for tensor in held) >= math.prod(deepspeed_zero.whole_shape(parameter))
        if not deepspeed_zero.is_absent(parameter):  # a small one is kept whole
            continue
        assert parameter.numel() == 0, "ZeRO 3 does not empty what it cuts any more"
        with engine.gathered([parameter]):
            assert not deepspeed_zero.is_absent(parameter)
            whole = parameter.detach().clone()
        assert deepspeed_zero.whole_shape(parameter) == whole.shape
        assert deepspeed_zero.slice_of(parameter) == (0, whole.numel())
        assert torch.equal(deepspeed_zero.slice_values(parameter), whole.view(-1))
    free = torch.ones(3)
    assert not deepspeed_zero.is_cut(free) and not deepspeed_zero.is_absent(free)
    assert deepspeed_zero.whole_shape(free) == (3,)


def test_outputs_that_zero3_does_not_know(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = built("zero3_fp32")
    assert utils.warned
    monkeypatch.setattr(utils, "warned", False)
    backward(engine)
    assert utils.warned, "DeepSpeed does not warn of the router's outputs any more"


def test_parameters_are_cut_one_module_after_the_other(one_rank: None) -> None:
    config = tiny(f"parallel.deepspeed={ds_config('zero3_fp32')}")
    start_groups(Layout.of(config.parallel, 1), timeout_minutes=1)
    filled = fill_in(config, resolve_parallel(config, 1), 1)
    first, second = nn.Linear(3, 5), nn.Linear(5, 3)
    whole = [parameter.detach().clone() for module in (first, second) for parameter in module.parameters()]
    deepspeed_zero.cut([*first.parameters()], filled, ModelParallelUnit())
    assert not any(map(deepspeed_zero.is_cut, second.parameters()))
    deepspeed_zero.cut([*second.parameters()], filled, ModelParallelUnit(), first.weight)
    for parameter, values in zip([*first.parameters(), *second.parameters()], whole, strict=True):
        assert deepspeed_zero.is_absent(parameter) and parameter.numel() == 0
        assert torch.equal(deepspeed_zero.slice_values(parameter), values.view(-1))
    # Otherwise the engine moves the whole model to the device, and then cuts it.
    source = inspect.getsource(deepspeed_engine.DeepSpeedEngine._configure_distributed_model)
    assert "is_zero_init_model):\n            self.module.to(self.device)" in source


def test_the_last_slice_may_be_short() -> None:
    """DeepSpeed's own setter, as the second of two ranks that share five elements has it."""
    optimizer = SimpleNamespace(
        _get_fp32_opt_state_partition=lambda *unused, **also_unused: (torch.zeros(3), 0),
        _get_param_partition_rank=lambda parameter: 1,
        _swappable_optimizer_subgroup=lambda number: False,
    )
    parameter = SimpleNamespace(requires_grad=True, ds_numel=5)
    with pytest.raises(RuntimeError, match="exceeds dimension size"):  # else `set_sliced_master` can go
        DeepSpeedZeroOptimizer_Stage3.set_full_hp_param(optimizer, torch.arange(5.0), parameter)


def check_ranges(engine: Engine, flat: Tensor, ranges: list[FlatRange]) -> int:
    """The masters in the flat tensor are the model's weights; their number."""
    for each in ranges:
        with engine.gathered([each.parameter]):
            weight = each.parameter.detach().reshape(-1)[each.start : each.start + each.numel].float()
        master = flat.detach().view(-1)[each.at : each.at + each.numel]
        torch.testing.assert_close(master, weight, rtol=1e-2, atol=1e-3)
    return sum(each.numel for each in ranges)


@pytest.mark.parametrize("file", ["zero1_bf16", "zero1_fp32", "zero2_bf16"])
def test_ranges_at_zero1(one_rank: None, file: str) -> None:
    engine, inner = built(file)
    flats = [group["params"][0] for group in engine.inner_optimizer.param_groups]
    found = zip(flats, ranges_at_zero1(inner.optimizer), strict=True)
    total = sum(check_ranges(engine, flat, ranges) for flat, ranges in found)
    assert total == sum(parameter.numel() for parameter in engine.model.parameters())


def test_ranges_at_zero3(one_rank: None) -> None:
    engine, inner = built("zero3_bf16")
    found = list(ranges_at_zero3(inner.optimizer))
    total = sum(check_ranges(engine, flat, ranges) for flat, ranges in found)
    assert total == sum(parameter.ds_numel for parameter in engine.model.parameters())
    for name in ("_optimizer_states_and_gradient_swap_in", "_optimizer_states_and_gradient_swap_out"):
        assert hasattr(inner.optimizer, name)


@pytest.mark.parametrize("file", ["zero1_fp32", "zero1_bf16", "zero2_bf16", "zero3_bf16"])
def test_slices_of_all_replicas(one_rank: None, file: str) -> None:
    """They are this rank's ranges; the parity of Muon with several ranks shows those of the others."""
    engine, inner = built(file)
    wrapper = inner.optimizer
    if "zero3" in file:
        slices = list(slices_at_zero3(wrapper))
        ranges = [each for _, found in ranges_at_zero3(wrapper) for each in found]
    else:
        slices = list(slices_at_zero1(wrapper, engine.inner_optimizer))
        ranges = [each for found in ranges_at_zero1(wrapper) for each in found]
    found = {id(each.parameter): (each.at, *each.starts) for each in slices}
    assert found == {id(r.parameter): (r.at, r.start, r.start + r.numel) for r in ranges}
    assert len(found) == sum(1 for _ in engine.model.parameters())


def test_skipped_gradients_are_kept(one_rank: None) -> None:
    engine, inner = built("zero2_bf16_offload")
    backward(engine, scale=float("inf"))
    inner.step()
    kept = [gradient for group in inner.optimizer.averaged_gradients.values() for gradient in group or ()]
    assert any(not gradient.isfinite().all() for gradient in kept), "DeepSpeed drops them by itself now"
    forget_gradients(inner.optimizer)
    assert not inner.optimizer.averaged_gradients


def test_gradients_that_are_not_finite_are_reported() -> None:
    """DeepSpeed's optimisers hold the gradients of a skipped step until `_update_scale` has returned."""
    for module in (stage_1_and_2, stage3):
        source = inspect.getsource(module)
        assert "self._update_scale(self.overflow)" in source and "self.averaged_gradients = {}" in source

    class Optimizer:
        def __init__(self) -> None:
            self.averaged_gradients = {0: [torch.tensor([1.0, math.nan])], 1: None}

        def _update_scale(self, has_overflow: bool = False) -> None:
            self.updated = has_overflow

    optimizer = Optimizer()
    found: dict[int, Tensor] = {}
    for overflow in (False, True):
        with watching_overflow(optimizer, lambda number, gradient: found.update({number: gradient})):
            optimizer._update_scale(overflow)
        assert optimizer.updated is overflow and list(found) == [0] * overflow
    assert "_update_scale" not in vars(optimizer)


def test_watching_leaves_what_was_set_on_the_optimizer() -> None:
    """`give_gradients_to` sets it once, and every step is watched."""

    class Optimizer:
        def _update_scale(self, has_overflow: bool = False) -> None:
            pytest.fail("the class's own")

    optimizer, called = Optimizer(), list[bool]()
    optimizer._update_scale = called.append  # type: ignore[assignment, method-assign]
    for _ in range(2):
        with watching_overflow(optimizer, lambda number, gradient: None):
            optimizer._update_scale(False)
    assert called == [False, False] and vars(optimizer)["_update_scale"] == called.append
