"""Starts the pretended CUDA device in every process of a rehearsed GPU check, and plants faults.

Python imports this file at its start where the folder is on PYTHONPATH. REHEARSED_FAULTS has sections and
faults, `attention:illegal,collectives:hang`: see FAULTS.
"""

import functools
import os
import sys
import time
from typing import Any

from tests.cuda import pretended

DEVICES = 2
CALLS = 6  # of attention, before an address is illegal


def illegal() -> None:
    """An illegal address is found by a later call, and ends the process."""
    import torch

    plain, calls = torch.nn.functional.scaled_dot_product_attention, 0

    def attend(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > CALLS:
            print("CUDA error: an illegal memory access was encountered", file=sys.stderr, flush=True)
            os.abort()
        return plain(*arguments, **options)

    torch.nn.functional.scaled_dot_product_attention = attend


def hang() -> None:
    """A rank that waits for the others for ever."""
    if "--on-rank" in sys.orig_argv and os.environ.get("RANK") == "1":
        time.sleep(3600)


def is_tuned() -> bool:
    """Whether this process trains in the setting that asks for Triton."""
    return any("zero1_bf16_cuda" in word for word in sys.orig_argv)


def out_of_memory() -> None:
    """The first tensor on the device in the tuned setting finds no memory."""
    import torch

    if not is_tuned():
        return

    def no_memory(*arguments: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    torch.nn.Module.to = no_memory  # type: ignore[method-assign]


def no_compiler() -> None:
    """No C compiler is found, which Triton needs."""
    os.environ["PATH"] = "/nonexistent"
    os.environ.pop("CC", None)


def without_triton() -> None:
    """Triton has no driver here: `auto` takes PyTorch's operators."""
    from megamoe.kernels import choice

    choice.triton_problem = functools.cache(lambda: "a rehearsal has no driver for Triton")


FAULTS = {"illegal": illegal, "hang": hang, "memory": out_of_memory, "compiler": no_compiler}

if "torch.distributed.run" not in sys.orig_argv and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    pretended.start(DEVICES)
    if "--one-section" in sys.orig_argv:
        os.environ["REHEARSED_SECTION"] = sys.orig_argv[sys.orig_argv.index("--one-section") + 1]
    if os.environ.get("REHEARSED_SECTION") == "training" and not is_tuned():
        without_triton()
    for planted in filter(None, os.environ.get("REHEARSED_FAULTS", "").split(",")):
        section, _, fault = planted.partition(":")
        if section == os.environ.get("REHEARSED_SECTION"):
            FAULTS[fault]()
