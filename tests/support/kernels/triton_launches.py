"""Checks of launches that prepare a kernel's arguments for a GPU and run nothing."""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from megamoe.compat import triton_launch
from megamoe.compat.triton_launch import run_kernel
from tests.support.in_subprocess import checks_of, run_checks

RAN: list[Any] = []


class Recorder:
    """Stands for a compiled kernel, and notes how it is launched."""

    packed_metadata = ("packed",)

    def __init__(self, source: Any, options: dict[str, Any]) -> None:
        self.kind = (source.fn.fn.__name__, source.signature, source.constants, source.attrs, options)
        self.function = object()
        self.arguments: tuple[Any, ...] = ()

    def run(self, *arguments: Any) -> None:
        RAN.append((self.kind, arguments[:6], arguments[6:]))

    def launch_metadata(self, *arguments: Any) -> None:
        return None


class Driver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 77


@triton.jit(do_not_specialize=["count"])
def _kernel(left, right, width, count, eps, ROWS: tl.constexpr, FLAG: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


@triton.jit
def _other(left, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    pass


def check_launches_as_triton_does() -> None:
    """Every kind of argument, each twice: the first call compiles, the second finds what was compiled."""
    driver.set_active(Driver())
    triton.compiler.compile = lambda source, target, options, **more: Recorder(source, options)
    whole = torch.zeros(64)
    lefts = [whole, whole[1:], whole[4:], whole.bfloat16(), whole.long()]
    rights = [whole, None, whole.half()[1:]]
    numbers = [1, 7, 16, 48, 2**40, 2**31]
    options: list[dict[str, Any]] = [
        {"ROWS": 1, "FLAG": True},
        {"ROWS": 16, "FLAG": False, "num_warps": 8},
        {"ROWS": 16, "FLAG": False, "num_stages": 8},
        {"FLAG": "tf32", "ROWS": 2, "num_warps": 4, "num_stages": 2},
    ]
    compared = 0
    for arguments in itertools.product(lefts, rights, numbers, numbers[:4], [1.0]):
        for each, grid in itertools.product(options, [(3,), (2, 5), (2, 5, 7)]):
            RAN.clear()
            _kernel[grid](*arguments, **each)
            run_kernel(_kernel, grid, *arguments, **each)
            run_kernel(_kernel, grid, *arguments, **each)
            triton_s, *ours = RAN
            for own in ours:
                assert own[0] == triton_s[0] and own[1] == triton_s[1], (own, triton_s)
                assert len(own[2]) == len(triton_s[2])
                assert all(
                    a is b or a == b for a, b in zip(own[2], triton_s[2], strict=True) if a is not None
                )
            compared += 1
    assert compared == 5 * 3 * 6 * 4 * 4 * 3
    RAN.clear()
    run_kernel(_other, (1,), whole, ROWS=2)
    assert RAN[0][0][0] == "_other"


def check_hooks_see_every_launch() -> None:
    """A profiler's hook gets Triton's own launches."""
    driver.set_active(Driver())
    triton.compiler.compile = lambda source, target, options, **more: Recorder(source, options)
    own = _kernel.run
    launched: list[Any] = []

    def run(*arguments: Any, **more: Any) -> Any:
        launched.append(1)
        return own(*arguments, **more)

    _kernel.run = run
    arguments = (torch.zeros(4), None, 3, 3, 1.0)
    for _ in range(3):
        run_kernel(_kernel, (1,), *arguments, ROWS=5, FLAG=True)
    assert len(launched) == 1
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: None)
    run_kernel(_kernel, (1,), *arguments, ROWS=5, FLAG=True)
    assert len(launched) == 2


def check_the_pinned_triton_is_known() -> None:
    assert triton_launch._launcher() is not None


if __name__ == "__main__":
    print(run_checks(checks_of(globals())))
