"""Launches of Triton kernels with less of the host's time.

Seen with: triton 3.7.1 and 3.9.0.
"""

from functools import cache
from typing import Any

VERSIONS = ("3.7.", "3.9.")  # of Triton, whose launches are known


def run_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Do `kernel[grid](*arguments, **options)`.

    kernel: of `triton.jit`. arguments: tensors, numbers and None, for its first parameters in their order.
    options: the values of all parameters after those, which are `tl.constexpr`; num_warps and num_stages. A
    compiled kernel is found by what Triton finds it by: the device, the options, dtypes, and which addresses
    and numbers are multiples of 16.

    Reason: in each launch Triton makes a text of the options, reads its settings, compares global variables
        and fills two dictionaries, which takes longer than all else. A step of 12 layers has 400 launches.
    Without it: a launch takes the host twice as long.
    Canary: test_triton_launch.py::test_launches_as_triton_does
    """
    launcher = _launcher()
    if launcher is None or not hasattr(kernel, "device_caches"):  # an unknown version, or the interpreter
        kernel[grid](*arguments, **options)
    else:
        launcher(kernel, grid, arguments, options)


@cache
def _launcher() -> "_Launcher | None":
    import triton

    return _Launcher() if triton.__version__.startswith(VERSIONS) else None


class _Launcher:
    """What launches need of Triton, read once, and the kernels that were compiled."""

    def __init__(self) -> None:
        from triton import knobs
        from triton.runtime.driver import driver
        from triton.runtime.jit import native_specialize_impl

        self.driver, self.settings, self.specialise = driver, knobs.runtime, native_specialize_impl
        # Of (the kernel, the device): its backend, what to specialise on of each argument, what was compiled.
        self.known: dict[tuple[int, int], tuple[Any, list[tuple[bool, bool]], dict[Any, Any]]] = {}

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: Any, options: dict[str, Any]) -> None:
        active, specialise = self.driver.active, self.specialise
        device = active.get_current_device()
        known = self.known.get((id(kernel), device)) or self._know(kernel, device)
        backend, flags, compiled = known
        kinds = [specialise(backend, each, False, *of) for each, of in zip(arguments, flags, strict=False)]
        key = (*kinds, *options, *options.values())
        found = compiled.get(key)
        enter, leave = self.settings.launch_enter_hook, self.settings.launch_exit_hook
        if found is None or getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            made = kernel[grid](*arguments, **options)
            names = [each.name for each in kernel.params[len(arguments) :]]
            compiled[key] = made, tuple(options[name] for name in names)
            return
        made, constants = found
        stream = active.get_current_stream(device)
        handles = (stream, made.function, made.packed_metadata, None, enter, leave)
        made.run(*(*grid, 1, 1)[:3], *handles, *arguments, *constants)

    def _know(self, kernel: Any, device: int) -> tuple[Any, list[tuple[bool, bool]], dict[Any, Any]]:
        backend = kernel.device_caches[device][3]
        of = [(not each.do_not_specialize, not each.do_not_specialize_on_alignment) for each in kernel.params]
        known: tuple[Any, list[tuple[bool, bool]], dict[Any, Any]] = (backend, of, {})
        self.known[id(kernel), device] = known
        return known
