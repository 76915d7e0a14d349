"""Canaries of PyTorch: a failure means that an update has fixed or removed something."""

import inspect
import os
import platform
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from megamoe.compat import torch_compat
from megamoe.compat.torch_compat import (
    AdamState,
    Foreach,
    assert_on_device,
    compile_vendors_functions_late,
    cudnn_problem,
    has_bf16_products,
    loader_deaths_raise,
    loader_processes,
    memory_key,
    next_node_number,
    raise_node_numbers,
    read_parameters_by,
    seed_torch,
    set_node_number,
    sgemm_address,
    shut_down_loader,
    urgent_group_options,
    watches_operators,
    widen_bf16_products,
)
from megamoe.model import backends
from tests.support.ranks.pool import Pool

INDUCTOR = "torch._inductor.compile_fx"
NUMBERS = TensorDataset(torch.arange(100))


def imports_of_inductor() -> tuple[bool, bool]:
    """Job: return whether a rank has imported Inductor at its start, and whether a decorator would."""
    at_start = INDUCTOR in sys.modules
    torch.compile(lambda: 0)
    return at_start, INDUCTOR in sys.modules


def test_parameters_are_read_by_a_function() -> None:
    layer = torch.nn.Linear(2, 3, bias=False)
    model, weight = torch.nn.Sequential(layer), layer.weight
    read_parameters_by(model, lambda parameter: parameter.detach() + 1)
    assert torch.equal(layer.weight, weight + 1) and layer.bias is None
    assert torch.equal(model(torch.ones(1, 2)), torch.ones(1, 2) @ (weight + 1).T)
    assert [*model.parameters()] == [weight] and dict(model.state_dict()).keys() == {"0.weight"}


def order_of_backward(first: int, second: int, last: int | None) -> list[str]:
    """Return the order of the nodes of three graphs whose own threads begin at these numbers."""
    order: list[str] = []
    leaf = torch.ones((), requires_grad=True)

    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor, name: str) -> Tensor:
            ctx.name = name
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
            order.append(ctx.name)
            return gradients[0], None

    made: dict[str, Tensor] = {}

    def make(name: str, number: int) -> None:
        raise_node_numbers(number)
        assert next_node_number() >= number
        made[name] = Named.apply(Named.apply(leaf, name), name)

    for name, number in (("first", first), ("second", second)):
        thread = threading.Thread(target=make, args=(name, number))
        thread.start()
        thread.join()
    end: Any = Named.apply(leaf, "end")
    if last is not None:
        set_node_number(end.grad_fn, last)
    torch.stack([end, *made.values()]).sum().backward()
    return order


def test_another_cudnn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        "cuDNN version incompatibility: PyTorch was compiled  against (9, 19, 0) but found runtime version "
        "(9, 14, 0). PyTorch already comes bundled with cuDNN. "
    )

    def refuse() -> None:
        raise RuntimeError(message)

    cudnn_problem.cache_clear()
    assert cudnn_problem() == ""
    cudnn_problem.cache_clear()
    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    row = backends._device_row()
    cudnn_problem.cache_clear()
    assert row == f"NVIDIA H100; PyTorch's attention runs without cuDNN: {message.partition('. ')[0]}"
    assert "PyTorch was compiled  against" in Path(torch.backends.cudnn.__file__).read_text()


def test_numbers_of_nodes() -> None:
    assert order_of_backward(100, 200, 0) == ["second", "second", "first", "first", "end"]
    assert order_of_backward(200, 100, 0) == ["first", "first", "second", "second", "end"]
    # Without a hand-over of numbers the nodes of both threads alternate, as both begin at 0.
    assert order_of_backward(0, 0, 0)[:2] in (["first", "second"], ["second", "first"])


def test_deterministic_algorithms_fill_new_memory() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)


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
    iterator._workers_done_event._cond.acquire(timeout=2.0)  # else the killed process has it
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


def test_the_processor_says_whether_it_multiplies_bf16() -> None:
    """oneDNN's highest instructions can be lowered: without AVX-512 it has no products in bf16."""
    code = "from megamoe.compat.torch_compat import has_bf16_products; print(has_bf16_products())"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.stdout.split() == ["False"], found.stderr
    flags = Path("/proc/cpuinfo").read_text()
    assert has_bf16_products() == ("avx512bw" in flags and "avx512vl" in flags and "avx512dq" in flags)


@pytest.fixture
def widened() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as told:  # PyTorch would warn at the first call of a process
        warnings.simplefilter("always")
        library = widen_bf16_products()
    assert not told
    yield
    library._destroy()


def test_widened_products_are_those_of_fp32_rounded_once(widened: None) -> None:
    """Of linear layers, matrices and batches, forward and backward; other dtypes are as before."""
    draws = torch.Generator().manual_seed(1)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draws)

    left, right, bias, batch = drawn(7, 5), drawn(3, 5), drawn(3), drawn(2, 5, 4)
    cases: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (functional.linear, (left, right)),
        (functional.linear, (left, right, bias)),
        (functional.linear, (drawn(2, 7, 5), right)),
        (torch.bmm, (drawn(2, 3, 5), batch)),
        (torch.matmul, (left.T, drawn(7, 2))),
        (lambda *those: torch.baddbmm(*those, beta=0.5, alpha=2), (drawn(2, 3, 4), drawn(2, 3, 5), batch)),
        (lambda *those: torch.addmm(*those, beta=0, alpha=3), (drawn(7, 3), left, right.T)),
    ]
    for function, given in cases:
        narrow = [one.bfloat16().requires_grad_() for one in given]
        wide = [one.detach().double().requires_grad_() for one in narrow]
        found, exact = function(*narrow), function(*wide)
        assert torch.equal(found, exact.float().bfloat16())
        sent = drawn(*exact.shape).bfloat16()
        for one, other in zip(
            torch.autograd.grad(found, narrow, sent, allow_unused=True),
            torch.autograd.grad(exact, wide, sent.double(), allow_unused=True),
            strict=True,
        ):
            if one is not None and other is not None:
                assert (one.double() - other).abs().max() <= 2**-7 * other.abs().max()
        whole = function(*given)
        assert whole.dtype == torch.float32
        torch.testing.assert_close(whole, function(*[one.double() for one in given]).float())


@pytest.mark.full
def test_widened_products_take_about_as_long_as_fp32() -> None:
    """Without AVX-512, which oneDNN is told here, a product of a batch took 120 times as long."""
    code = (
        "import time, torch\n"
        "from megamoe.compat.torch_compat import widen_bf16_products\n"
        "keep = widen_bf16_products()\n"
        "left, right = torch.randn(8, 128, 256), torch.randn(8, 256, 256)\n"
        "def took(*those):\n"
        "    start = time.perf_counter()\n"
        "    torch.bmm(*those)\n"
        "    return time.perf_counter() - start\n"
        "wide = min(took(left, right) for _ in range(5))\n"
        "print(min(took(left.bfloat16(), right.bfloat16()) for _ in range(5)) / wide)"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert float(found.stdout) < 10, found.stderr


def test_memory_has_a_key() -> None:
    """Views share it; other tensors that are alive have another one, fake and empty ones too."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for context in (nullcontext(), FakeTensorMode()):
        with context:
            first, second, empty = torch.zeros(4), torch.zeros(4), torch.zeros(0)
            assert memory_key(first[1:3].view(2, 1)) == memory_key(first)
            assert len({memory_key(each) for each in (first, second, empty)}) == 3


@pytest.mark.parametrize("number", [0, 7, 2**62 + 5, -3])
def test_seeds(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same draws as after `torch.manual_seed`, which asks for the stack and must not be needed."""
    torch.manual_seed(number)
    expected = torch.rand(3)
    formatted: list[str] = []

    def format_stack() -> list[str]:
        formatted.append("once")
        return formatted

    monkeypatch.setattr("traceback.format_stack", format_stack)
    seed_torch(number)
    assert torch.equal(torch.rand(3), expected) and not formatted
    torch.manual_seed(number)
    assert formatted


def test_watched_operators() -> None:
    """A dispatch mode and the profiler see operators; nothing else does."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    assert not watches_operators()
    with Mode():
        assert watches_operators()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert watches_operators()
    assert not watches_operators()


def test_options_of_an_urgent_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream

    gloo: Any = distributed.ProcessGroupGloo
    assert hasattr(gloo._Options, "_timeout")  # as those of NCCL, which is not here
    if not distributed.is_nccl_available():
        assert urgent_group_options(None) is None
        stand_in = SimpleNamespace(Options=Options)
        monkeypatch.setattr(distributed, "ProcessGroupNCCL", stand_in, raising=False)
    options = urgent_group_options(timedelta(minutes=3))
    assert options.is_high_priority_stream and options._timeout == timedelta(minutes=3)
