"""Canaries of DeepSpeed's start, process groups and loss scale."""

import importlib.util
import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime import bf16_optimizer, utils
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.fp16.loss_scaler import LossScaler as StaticLossScaler
from deepspeed.utils import groups

from megamoe.compat import deepspeed_compat
from megamoe.compat.deepspeed_compat import LossScaler
from megamoe.parallel import launch
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import start_groups
from tests.support.tiny import restored_process


def as_installed(module: ModuleType) -> Any:
    """Execute the module once more: an earlier test may have patched the imported one."""
    assert module.__spec__ is not None and module.__spec__.loader is not None
    fresh = importlib.util.module_from_spec(module.__spec__)
    module.__spec__.loader.exec_module(fresh)
    return fresh


def test_shared_memory_op(monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    assert "build_shm_op()" in inspect.getsource(backend.TorchBackend), "DeepSpeed builds it no more"
    monkeypatch.setattr(backend, "build_shm_op", lambda: "built")
    deepspeed_compat.skip_shared_memory_op()
    assert backend.build_shm_op() is None


def test_a_second_world_in_one_process() -> None:
    """DeepSpeed, which keeps its backend object after the first, joins the second all the same."""
    for _ in range(2):
        with restored_process():
            launch.start(launch.find_world(), timeout_minutes=1)
            assert dist.is_initialized() and deepspeed.comm.is_initialized()
            launch.stop()
        assert not dist.is_initialized() and not deepspeed.comm.is_initialized()


def test_groups_are_kept() -> None:
    """The groups belong to a separate world."""
    with restored_process():
        launch.start(launch.find_world(), timeout_minutes=1)
        start_groups(Layout(1), timeout_minutes=1)
        dist.destroy_process_group()
        try:
            assert groups._EXPERT_PARALLEL_GROUP, "DeepSpeed forgets its groups by itself now"
        finally:
            launch.stop()
    assert not groups._EXPERT_PARALLEL_GROUP and not groups._EXPERT_DATA_PARALLEL_GROUP
    assert groups.mpu is None


def test_expert_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"):
        monkeypatch.setattr(groups, name, {})
    holders, copies = object(), object()
    deepspeed_compat.set_expert_groups("ep_size_7", holders, copies)  # type: ignore[arg-type]
    assert deepspeed_compat.expert_groups("ep_size_7") == (holders, copies)
    public = [name for name in vars(groups) if name.startswith(("get_expert", "set_expert"))]
    assert not public, "DeepSpeed has public functions for experts' groups now"


def test_memory_reports_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr(
        bf16_optimizer, "see_memory_usage", lambda message, force=False: reported.append(message)
    )
    source = inspect.getsource(bf16_optimizer.BF16_Optimizer)
    forced = source.count("see_memory_usage(") and source.count("force=True")
    assert forced, "DeepSpeed does not report its memory any more"
    deepspeed_compat.silence_memory_reports()
    bf16_optimizer.see_memory_usage("before", force=True)
    assert reported == []


@pytest.mark.parametrize("values", [(3.0, 4.0), (3.0, float("inf")), (float("nan"), 4.0), (0.0, 0.0)])
def test_norm_is_read_piece_by_piece(monkeypatch: pytest.MonkeyPatch, values: tuple[float, float]) -> None:
    """Ours answers what DeepSpeed's answers."""
    plain = as_installed(utils)
    assert "float(v)" in inspect.getsource(plain.get_norm_with_moe_layers), "it stays on the device by now"
    assert "torch.tensor(-1.0" in inspect.getsource(plain.mask_nan_or_inf_with_val_inplace)
    for module in (utils, bf16_optimizer):
        for name in ("mask_nan_or_inf_with_val_inplace", "get_norm_with_moe_layers"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(plain, name))
    monkeypatch.setattr(groups, "_get_expert_parallel_group", lambda name: None)
    dense, expert = torch.tensor(values[0]), [torch.tensor([values[1]])]
    plain.mask_nan_or_inf_with_val_inplace(dense)
    expected = plain.get_norm_with_moe_layers(dense, None, {"experts": expert})
    deepspeed_compat.read_norm_once()
    dense = torch.tensor(values[0])
    utils.mask_nan_or_inf_with_val_inplace(dense)
    assert bf16_optimizer.get_norm_with_moe_layers(dense, None, {"experts": expert}) == expected


def test_cpu_adam_counts_in_int() -> None:
    """From its source: an instance needs a compiled library."""
    assert "state['step'] = 0" in inspect.getsource(DeepSpeedCPUAdam.step)
    optimizer: Any = object.__new__(DeepSpeedCPUAdam)
    assert deepspeed_compat.counts_steps_in_int(optimizer)


def test_loss_scaler() -> None:
    arguments = {"scale_window": 9, "min_scale": 2.0, "delayed_shift": 1, "consecutive_hysteresis": False}
    scalers = [DynamicLossScaler(init_scale=scale, **arguments) for scale in (2.0, 64.0)]
    smallest, other = (LossScaler(SimpleNamespace(loss_scaler=s, loss_scale=s.loss_scale)) for s in scalers)
    assert (smallest.scale, smallest.can_fall, other.can_fall) == (2.0, False, True)
    scalers[1].update_scale(overflow=False)
    state = other.state()
    assert state == {"cur_scale": 64.0, "cur_iter": 1, "last_overflow_iter": -1, "cur_hysteresis": 1}
    with pytest.raises(Exception, match=LossScaler.AT_MINIMUM) as raised:
        scalers[0].update_scale(overflow=True)
    assert LossScaler.is_at_minimum(raised.value)
    assert type(raised.value) is Exception, "DeepSpeed raises a narrower one now"
    smallest.restore(state)
    assert smallest.state() == state and smallest.can_fall
    static = StaticLossScaler(8.0)
    fixed = LossScaler(SimpleNamespace(loss_scaler=static, loss_scale=8.0))
    fixed.restore(state)
    assert (static.loss_scale, fixed.state(), fixed.can_fall) == (8.0, {}, False)
