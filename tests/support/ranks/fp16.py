"""fp16 where DeepSpeed refuses it: PyTorch's half operations run on a CPU, only slowly."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from deepspeed.accelerator import get_accelerator


@contextmanager
def with_fp16(supported: bool = True) -> Iterator[None]:
    """Make the accelerator report that it supports fp16, or that it does not."""
    with mock.patch.object(get_accelerator(), "is_fp16_supported", lambda: supported):
        yield
