"""Quiet start: what the libraries say to their own developers at import does not concern a run's user."""

import logging
import os
import warnings

_NOTICES = (
    ".*(Transformer Engine|Apex).*not installed.*",
    ".*full scope is deprecated.*",
    r".*`torch\.distributed\.\w+` is deprecated.*",  # DeepSpeed's collectives
)


def settle_vendors() -> None:
    """Call once in an entry point, before torch's, DeepSpeed's and Megatron-Core's modules are imported.

    Their warnings about this machine and errors still pass.
    """
    for message in _NOTICES:
        warnings.filterwarnings("ignore", message=message)
    for name in ("DeepSpeed", "megatron.core", "torch.distributed.elastic", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # found anyway, but only after a warning
