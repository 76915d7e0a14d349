"""The libraries that megamoe is built on: whether their versions are tested ones, and a quiet start."""

import contextlib
import gc
import importlib.metadata
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from megamoe.errors import UserError

# By distribution: its module, the oldest version that is supported, and the first one that is not tested.
# The same as the bounds in pyproject.toml; the versions tested are in constraints/.
TESTED = {
    "torch": ("torch", "2.13", "2.16"),
    "megatron-core": ("megatron", "0.16.1", "0.20"),
    "deepspeed": ("deepspeed", "0.19.8", "0.20"),
}
_NOTICES = (
    ".*(Transformer Engine|Apex).*not installed.*",
    ".*full scope is deprecated.*",
    r".*`torch\.distributed\.\w+` is deprecated.*",  # DeepSpeed's collectives
)


def check_versions() -> None:
    """Call once in an entry point, before `configure_libraries`. Imports none of the libraries.

    A version newer than the tested ones is one line of warning on rank 0, and with MEGAMOE_ANY_VERSION=1 in
    the environment an older one too. A library without metadata, such as a source tree on PYTHONPATH, is not
    checked.

    Raises:
        UserError: if one of the libraries is missing or too old.
    """
    for name, (module, oldest, untested) in TESTED.items():
        way_out = f"pip install '{name}>={oldest},<{untested}'"
        found = _installed_version(name)
        if found is None:
            if importlib.util.find_spec(module) is None:
                raise UserError(f"{name}: not installed, expected {oldest} or later; {way_out}")
            continue
        # Without its pre-release part: a container's 2.14.0a0+nv is as good as a 2.14.
        release = Version(found.base_version)
        is_old = release < Version(oldest)
        if is_old and os.environ.get("MEGAMOE_ANY_VERSION") != "1":
            raise UserError(f"{name}: found version {found}, expected {oldest} or later; {way_out}")
        if (is_old or release >= Version(untested)) and _is_first_rank():
            print(
                f"warning: {name}: found version {found}, tested from {oldest} up to, but not including, "
                f"{untested}; if the run fails: {way_out}",
                file=sys.stderr,
                flush=True,
            )


def _installed_version(name: str) -> Version | None:
    """Return the version; None where there is no metadata, or none that can be compared."""
    try:
        return Version(importlib.metadata.version(name))
    except (importlib.metadata.PackageNotFoundError, InvalidVersion, TypeError):
        return None


def _is_first_rank() -> bool:
    return (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0"


def configure_libraries() -> None:
    """Call once in an entry point, before torch's, DeepSpeed's and Megatron-Core's modules are imported.

    Silences what they tell their own developers at import; warnings about this machine, and errors, still
    pass.

    Reason: these lines do not concern a run's user, and each rank would print them.
    Seen with: torch 2.13 and 2.15, Megatron-Core 0.16.1 and 0.19.2, DeepSpeed 0.19.8.
    Without it: some ten lines of warnings before the first line of a run.
    Canary: test_startup.py::test_the_libraries_would_warn_at_import
    """
    for message in _NOTICES:
        warnings.filterwarnings("ignore", message=message)
    # From Python 3.12 on, when a file of Megatron-Core's is compiled; the module is the file's path then.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*\bmegatron\b.*")
    # The planner of checkpoints also raises what it warns of.
    of_torch = ("torch.distributed.checkpoint", "torch.distributed.elastic", "torch.utils.cpp_extension")
    for name in ("DeepSpeed", "megatron.core", *of_torch):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        # Expert batches change their sizes at every step, by which fixed segments fragment.
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    with importing():
        import torch

        from megamoe.compat.torch_compat import compile_vendors_functions_late

    compile_vendors_functions_late()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # found anyway, but only after a warning


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import modules in this context without garbage collection, and leave them out of later collections.

    Reason: torch, Megatron-Core and DeepSpeed make 700,000 objects that stay until the process ends.
    Seen with: torch 2.13 and 2.15, Megatron-Core 0.16.1 and 0.19.2, DeepSpeed 0.19.8.
    Without it: their import takes a fifth longer, and each full collection of the training 0.4 s.
    Canary: test_startup.py::test_imports_are_left_out_of_garbage_collection
    """
    was_enabled, imported = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if len(sys.modules) > imported:
                gc.freeze()
            gc.enable()
