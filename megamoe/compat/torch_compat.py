"""PyTorch: the import of its compiler, private operators, Adam's state, loader processes, and its BLAS.

Seen with: torch 2.13 and 2.15, where an entry does not say otherwise.
"""

import contextlib
import ctypes
import functools
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

_compile_now = torch.compile


def compile_vendors_functions_late() -> None:
    """Let a function of Megatron-Core or DeepSpeed with `torch.compile` as decorator import it when called.

    Call it before their modules are imported. What the function computes is the same. Inside of another
    compiled function it is traced as it is written, which `torch.compile` does with nested ones too.

    Reason: at the decorator `torch.compile` imports Inductor, and a run of megamoe calls none of these
        functions.
    Seen with: torch 2.13, Megatron-Core 0.16.1, DeepSpeed 0.19.8.
    Without it: each process of a run starts with 1.8 s more of CPU time.
    Canary: test_torch.py::test_functions_of_the_vendors_do_not_import_inductor
    """
    torch.compile = _compile_late


def _compile_late(model: Any = None, **options: Any) -> Any:
    if model is None:
        return functools.partial(_compile_late, **options)
    if not getattr(model, "__module__", "").startswith(("megatron.", "deepspeed.")):
        return _compile_now(model, **options)
    compiled = functools.cache(lambda: _compile_now(model, **options))

    @functools.wraps(model)
    def call(*arguments: Any, **keywords: Any) -> Any:
        function = model if torch.compiler.is_compiling() else compiled()
        return function(*arguments, **keywords)

    return call


class Foreach:
    """Operators on lists of tensors, each in one launch or a few on CUDA.

    Reason: the public torch.optim and clip_grad functions are built on `torch._foreach_...`, which have no
        public names, and torch.nn.utils.get_total_norm sums bf16 norms in bf16.
    Without it: a launch per parameter.
    Canary: test_torch.py::test_foreach_operators
    """

    @staticmethod
    def scale(tensors: list[Tensor], factor: float) -> None:
        """Multiply each tensor in place."""
        torch._foreach_mul_(tensors, factor)

    @staticmethod
    def add(tensors: list[Tensor], number: float) -> None:
        """Add a number to each tensor in place."""
        torch._foreach_add_(tensors, number)

    @staticmethod
    def copy(targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy each source into its target, whose dtype may differ."""
        torch._foreach_copy_(targets, sources)

    @staticmethod
    def norms(tensors: list[Tensor]) -> list[Tensor]:
        """Return the L2 norm of each tensor, an fp32 scalar."""
        return list(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail if the bool scalar is false, on CUDA without waiting for the device.

    Reason: `torch._assert_async` is documented in no release.
    Without it: each check would wait for the device, or there would be none.
    Canary: test_torch.py::test_assert_on_device
    """
    torch._assert_async(condition, message)


def leave_new_memory_as_it_is() -> None:
    """Let PyTorch's deterministic algorithms write nothing into new tensors, which all are written later.

    Reason: they fill every new tensor with NaN, to show a use of what was never written.
    Seen with: torch 2.13.
    Without it: `train.deterministic` writes the memory of new tensors twice, on a CPU too.
    Canary: test_torch.py::test_deterministic_algorithms_fill_new_memory
    """
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_torch(number: int) -> None:
    """Seed PyTorch's generators of the CPU and of CUDA, as `torch.manual_seed` does.

    Reason: `torch.manual_seed` also formats a traceback for each kind of device that is not in use.
    Seen with: torch 2.13 and 2.15.
    Without it: 0.2 to 2 ms, by the depth of the stack, for each block that is built and each dropout.
    Canary: test_torch.py::test_seeds
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


@functools.cache
def cudnn_problem() -> str:
    """Return why PyTorch cannot use the cuDNN that this process has loaded, in one line; empty if it can.

    Reason: PyTorch says it only where it is asked for the version, and only the first time. Another library,
        such as Transformer Engine, may have loaded an older cuDNN of the system before.
    Seen with: torch 2.11, Transformer Engine 2.20.
    Without it: attention silently leaves cuDNN for FlashAttention, which took a fifth longer on an H100.
    Canary: test_torch.py::test_another_cudnn_is_named
    """
    try:
        torch.backends.cudnn.version()
    except RuntimeError as error:
        return str(error).partition(". ")[0]
    return ""


def watches_operators() -> bool:
    """Return whether something sees the operators that this thread calls: a dispatch mode or the profiler.

    Reason: PyTorch has no public name for either question.
    Without it: our kernels would always pass the dispatcher, 2 us of the host in each of 270 calls a step.
    Canary: test_torch.py::test_watched_operators
    """
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._autograd._profiler_enabled())


def urgent_group_options(timeout: timedelta | None) -> Any:
    """Return the options of a group of NCCL whose stream comes before others; None without NCCL.

    timeout: of the group, None for NCCL's.

    Reason: `new_group` warns where the options have another timeout, which has no public name.
    Without it: a warning for each group; or what is exchanged waits for all blocks of a product before it.
    Canary: test_torch.py::test_options_of_an_urgent_group
    """
    if not hasattr(distributed, "ProcessGroupNCCL"):
        return None
    options = distributed.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout
    return options


def next_node_number() -> int:
    """Return the number of the next node that autograd makes in this thread.

    Of the nodes that are ready, a backward pass runs the one with the highest number first.

    Reason: `_get_sequence_nr` has no public name.
    Without it: a backward pass over graphs of two threads, each of which numbers its nodes from 0, would go
        through them in no useful order.
    Canary: test_torch.py::test_numbers_of_nodes
    """
    return int(torch._C._autograd._get_sequence_nr())


def raise_node_numbers(least: int) -> None:
    """Let the nodes that this thread makes from now on have numbers of at least `least`.

    Reason: the counter cannot be set, so nodes are made for nothing, 0.3 us each.
    Without it: as of `next_node_number`.
    Canary: test_torch.py::test_numbers_of_nodes
    """
    with torch.enable_grad():
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        while (missing := least - next_node_number()) > 0:
            torch.atleast_1d([leaf] * min(missing, 4096))


def set_node_number(node: Any, number: int) -> None:
    """Set the number of a node, see `next_node_number`.

    Reason: `_set_sequence_nr` begins with an underscore.
    Without it: nothing could be done after all other nodes of a backward pass, but within it.
    Canary: test_torch.py::test_numbers_of_nodes
    """
    node._set_sequence_nr(number)


class _ReadParameters(dict[str, Any]):
    def __init__(self, parameters: dict[str, Any], read: Callable[[Any], Any]) -> None:
        super().__init__(parameters)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        return None if parameter is None else self._read(parameter)


def read_parameters_by(module: torch.nn.Module, read: Callable[[Any], Tensor]) -> None:
    """Let `module.weight` give read(parameter), in all submodules; iteration gives the parameters themselves.

    Reason: `functional_call` exchanges parameters for all threads, and they would be exchanged at each turn.
    Without it: two forward passes at a time could not have leaf tensors of their own.
    Canary: test_torch.py::test_parameters_are_read_by_a_function
    """
    for each in module.modules():
        if each._parameters:
            each.__dict__["_parameters"] = _ReadParameters(each._parameters, read)


@dataclass
class AdamState:
    """A parameter group's tensors that have a gradient, and their moments, which the first call makes.

    The fields are in the order of the arguments of torch.optim.Adam._init_group.

    Reason: only `_init_group` makes the moments as PyTorch's own step wants them.
    Without it: the compiled AdamW would need a copy of PyTorch's code, and the two could drift apart.
    Canary: test_torch.py::test_adam_state
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    largest_squares: list[Tensor]
    steps: list[Tensor]

    @classmethod
    def of(cls, optimizer: torch.optim.Adam, group: dict[str, Any]) -> "AdamState":
        """Return the state of one of the optimiser's parameter groups."""
        state = cls([], [], [], [], [], [])
        optimizer._init_group(group, *vars(state).values())
        return state

    def passed_over(self) -> list[Tensor]:
        """Return all that a step reads and writes."""
        return self.weights + self.gradients + self.means + self.squares


def sgemm_address() -> int | None:
    """Return the address of PyTorch's own fp32 BLAS product; None where its library shows none.

    Reason: PyTorch has no public product of groups of different sizes that is fast in fp32, and a second
        BLAS in the process would fight over the threads.
    Seen with: torch 2.13 and 2.15 for Linux on x86-64 (libtorch_cpu.so exports MKL's `sgemm_`).
    Without it: experts in fp32 are computed by torch's grouped product.
    Canary: test_torch.py::test_sgemm_address
    """
    try:
        blas = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(blas.sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def loader_processes(iterator: Any) -> list[BaseProcess]:
    """Return the processes of a DataLoader's iterator; none if it reads in this process.

    Reason: PyTorch tells of a worker's death only where it waits for a batch.
    Without it: a worker that dies between two batches is noticed when the queue has run dry.
    Canary: test_torch.py::test_loader_processes
    """
    return list(getattr(iterator, "_workers", ()))


def shut_down_loader(iterator: Any) -> None:
    """End a DataLoader's iterator and its processes.

    Reason: the multi-process iterator has no public end before the last batch.
    Without it: the processes of a closed loader live on until the garbage collector finds the iterator. A
        process that was killed may also have held the lock of the iterator's event, for which PyTorch waits
        forever; the event is replaced then.
    Canary: test_torch.py::test_loader_processes
    """
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is None:
        return
    processes = loader_processes(iterator)
    if any(not process.is_alive() for process in processes):
        for process in processes:
            process.kill()
            process.join(1)
        iterator._workers_done_event = get_context("fork").Event()
    shut_down()
    for process in processes:  # one that hangs has been told to end, and does not listen
        if process.is_alive():
            process.kill()
            process.join(1)


class _Handlers:
    """of_torch: PyTorch's handler of SIGCHLD, which raises the death of a loader; once it has set one."""

    of_torch: Any = None


@contextlib.contextmanager
def loader_deaths_raise() -> Iterator[None]:
    """Inside, and nowhere else, the death of a DataLoader's process raises RuntimeError in the main thread.

    Reason: a DataLoader's first iterator sets a handler of SIGCHLD for the whole process, for good.
    Without it: a loader's death breaks off whatever the main thread is about to do, such as a save.
    Canary: test_torch.py::test_loader_deaths
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        if _Handlers.of_torch is not None:
            signal.signal(signal.SIGCHLD, _Handlers.of_torch)
        yield
    finally:
        now = signal.getsignal(signal.SIGCHLD)
        if now is not before:
            _Handlers.of_torch = now
            # None: one that was set outside of Python, which PyTorch has replaced for good.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


@functools.cache
def has_bf16_products() -> bool:
    """Whether PyTorch multiplies matrices in bf16 by oneDNN on this processor, which needs AVX-512 or AMX.

    Reason: elsewhere it multiplies number by number, and its test of the processor is a private operator.
    Seen with: torch 2.13 and 2.15: `torch.ops.mkldnn._is_mkldnn_bf16_supported`.
    Without it: nobody knows where to call `widen_bf16_products`.
    Canary: test_torch.py::test_the_processor_says_whether_it_multiplies_bf16
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def widen_bf16_products() -> torch.library.Library:
    """Let this process multiply bf16 matrices on the CPU in fp32: widened, summed in fp32, rounded once.

    All products of modules and of their backward passes, `F.linear` and `@` too, end in four operators. A
    product's operands exist in fp32 while it is computed; nothing is kept. Products of other dtypes stay as
    they are. It lasts until the result is destroyed (`_destroy`).

    Reason: without oneDNN's bf16, PyTorch 2.13 takes 5 (mm) to 120 times (bmm) as long as in fp32.
    Seen with: torch 2.13 and 2.15, whose operators with `out=` differ from those replaced.
    Without it: a run in bf16 takes up to 60 times as long as in fp32 on a processor without AVX-512.
    Canary: test_torch.py::test_widened_products_are_those_of_fp32_rounded_once
    """
    library = torch.library.Library("aten", "IMPL")

    def product(name: str, left: Tensor, right: Tensor) -> Tensor:
        operator = getattr(torch.ops.aten, name).out
        sizes = (*left.shape[:-1], right.shape[-1])
        if left.dtype != torch.bfloat16 or right.dtype != torch.bfloat16:
            return operator(left, right, out=left.new_empty(sizes))
        return operator(left.float(), right.float(), out=left.new_empty(sizes, dtype=torch.float32))

    def plain(name: str) -> Callable[..., Tensor]:
        return lambda left, right: product(name, left, right).to(left.dtype)

    def added(name: str) -> Callable[..., Tensor]:
        def replaced(start: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
            wide = product(name, left, right)
            wide = wide if alpha == 1 else wide * alpha
            return (wide if beta == 0 else wide + start * beta).to(left.dtype)

        return replaced

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*previously registered kernel")
        library.impl("mm", plain("mm"), "CPU")
        library.impl("bmm", plain("bmm"), "CPU")
        library.impl("addmm", added("mm"), "CPU")
        library.impl("baddbmm", added("bmm"), "CPU")
    return library


def memory_key(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from that of all others that are alive.

    Reason: `data_ptr` is 0 for empty tensors and refused by fake ones.
    Seen with: PyTorch 2.13.
    Without it: a plan could not tell which values are computed again (`model.recompute`).
    Canary: test_torch.py::test_memory_has_a_key
    """
    return int(tensor.untyped_storage()._cdata)
