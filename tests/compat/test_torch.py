"""Canaries of PyTorch: a failure means that an update has fixed or removed something."""

import inspect
import platform
import signal
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from megamoe.compat import torch_compat
from megamoe.compat.torch_compat import (
    AdamState,
    Foreach,
    assert_on_device,
    compile_vendors_functions_late,
    loader_deaths_raise,
    loader_processes,
    sgemm_address,
    shut_down_loader,
    step_with_scaled_gradients,
)
from tests.support.ranks.pool import Pool

INDUCTOR = "torch._inductor.compile_fx"
NUMBERS = TensorDataset(torch.arange(100))


def imports_of_inductor() -> tuple[bool, bool]:
    """Job: return whether a rank has imported Inductor at its start, and whether a decorator would."""
    at_start = INDUCTOR in sys.modules
    torch.compile(lambda: 0)
    return at_start, INDUCTOR in sys.modules


def test_functions_of_the_vendors_do_not_import_inductor(pool: Pool) -> None:
    assert pool.run(imports_of_inductor, ranks=1) == [(False, True)]


def test_functions_of_the_vendors_are_compiled_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(number: torch.Tensor) -> torch.Tensor:
        return 2 * number

    compile_now, calls = torch_compat._compile_now, []

    def recorded(function: Any, **options: Any) -> Any:
        calls.append(options)
        return compile_now(function, **options)

    monkeypatch.setattr(torch_compat, "_compile_now", recorded)
    compile_vendors_functions_late()
    late = []
    for module in ("megatron.core.activations", "deepspeed.runtime.zero", "tests"):
        double.__module__ = module
        late += [
            torch.compile(double, backend="eager"),
            torch.compile(backend="eager", dynamic=False)(double),
        ]
    assert len(calls) == 2  # not a vendor's: at once
    whole = torch.compile(lambda number: late[0](number) + 1, backend="eager", fullgraph=True)
    assert float(whole(torch.tensor(4.0))) == 9 and len(calls) == 3
    for _ in range(2):
        assert [float(function(torch.tensor(3.0))) for function in late] == [6.0] * 6
    assert calls[3:] == [{"backend": "eager"}, {"backend": "eager", "dynamic": False}] * 2


def test_foreach_operators() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    Foreach.scale(tensors, 3.0)
    Foreach.add(tensors, 1.0)
    assert [tensor.tolist() for tensor in tensors] == [[4.0] * 2, [4.0] * 3]
    halves = [torch.empty(2, dtype=torch.bfloat16), torch.empty(3, dtype=torch.bfloat16)]
    Foreach.copy(halves, tensors)
    assert [half.tolist() for half in halves] == [[4.0] * 2, [4.0] * 3]
    norms = Foreach.norms([*tensors, torch.full((5,), 3.0, dtype=torch.bfloat16)])
    assert all(norm.dtype == torch.float32 for norm in norms)
    torch.testing.assert_close(torch.stack(norms), torch.tensor([32.0, 48.0, 45.0]).sqrt())
    names = ("foreach_mul_", "foreach_add_", "foreach_copy_", "foreach_norm")
    public = [name for name in names if hasattr(torch, name)]
    assert not public, "PyTorch has public names for them now"


def test_steps_with_scaled_gradients() -> None:
    """As with gradients that were scaled before; the next step is not scaled."""
    starts = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    weights = [torch.nn.Parameter(starts[0].clone()) for _ in range(2)]
    optimizers = [torch.optim.Adam([weight], lr=0.1, weight_decay=0.1, fused=True) for weight in weights]
    for factor in (0.3, 1e-4, 1.0):
        for weight in weights:
            weight.grad = starts[1].clone()
        step_with_scaled_gradients(optimizers[0], factor, torch.device("cpu"))
        weights[1].grad = starts[1] * factor
        optimizers[1].step()
        torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)
    assert not hasattr(optimizers[0], "grad_scale")


def test_assert_on_device() -> None:
    assert_on_device(torch.tensor(True), "unseen")
    with pytest.raises(RuntimeError, match="seen"):
        assert_on_device(torch.tensor(False), "seen")
    assert not hasattr(torch, "assert_async"), "PyTorch has a public name for it now"


def test_adam_state() -> None:
    arguments = list(inspect.signature(torch.optim.Adam._init_group).parameters)
    expected = ["params_with_grad", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]
    assert arguments == ["self", "group", *expected]
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    parameters[1].grad = torch.full((2,), 5.0)
    optimizer = torch.optim.Adam(parameters, fused=True)
    state = AdamState.of(optimizer, optimizer.param_groups[0])
    assert [weight is parameters[1] for weight in state.weights] == [True]
    assert [gradient.tolist() for gradient in state.gradients] == [[5.0, 5.0]]
    kept = optimizer.state[parameters[1]]
    assert state.means[0] is kept["exp_avg"] and state.squares[0] is kept["exp_avg_sq"]
    assert state.steps[0] is kept["step"] and float(kept["step"]) == 0
    assert parameters[0] not in optimizer.state


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="seen on Linux, x86-64 alone"
)
def test_sgemm_address() -> None:
    assert sgemm_address(), "libtorch_cpu.so shows no sgemm_ any more"


def test_a_killed_loader_process_may_have_held_the_lock() -> None:
    """PyTorch's own end of the iterator would wait for the lock forever."""
    with loader_deaths_raise():
        iterator: Any = iter(DataLoader(NUMBERS, num_workers=2, multiprocessing_context="fork"))
    loader_processes(iterator)[0].kill()
    loader_processes(iterator)[0].join()
    iterator._workers_done_event._cond.acquire()
    shut_down_loader(iterator)
    assert not any(process.is_alive() for process in loader_processes(iterator))


def test_loader_processes() -> None:
    with loader_deaths_raise():
        iterator = iter(DataLoader(NUMBERS, num_workers=1, multiprocessing_context="fork"))
        (process,) = loader_processes(iterator)
        assert process.is_alive()
        shut_down_loader(iterator)
    assert not process.is_alive()
    assert loader_processes(iter(DataLoader(NUMBERS))) == []
    public = [name for name in ("close", "shutdown", "shut_down") if hasattr(iterator, name)]
    assert not public, "PyTorch has a public end of a loader now"


def test_loader_deaths() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    with loader_deaths_raise():
        iterator = iter(DataLoader(NUMBERS, num_workers=1, multiprocessing_context="fork"))
        assert signal.getsignal(signal.SIGCHLD) is not before, "PyTorch sets no handler of SIGCHLD any more"
        shut_down_loader(iterator)
    assert signal.getsignal(signal.SIGCHLD) is before
