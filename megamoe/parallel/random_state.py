"""The random states of one rank as tensors: torch (CPU and device), NumPy, Python."""

import random

import numpy
import torch
from torch import Tensor

from megamoe.compat.torch_compat import seed_torch

_NUMPY_KEYS = 624  # of the Mersenne Twister


def seed(number: int) -> None:
    """Seed all generators with `number`."""
    seed_torch(number)
    numpy.random.seed(number % 2**32)
    random.seed(number)


def capture(device: torch.device) -> dict[str, Tensor]:
    """Return the states as named tensors for `restore`."""
    _, keys, position, has_gauss, gauss = numpy.random.get_state()
    _, internal, gauss_next = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numpy.asarray(keys, dtype=numpy.int64)),
        "numpy_place": torch.tensor([position, has_gauss]),
        "numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
        "python": torch.tensor(internal),
        "python_gauss": torch.tensor(
            [float("nan") if gauss_next is None else gauss_next], dtype=torch.float64
        ),
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def restore(tensors: dict[str, Tensor], device: torch.device) -> None:
    """Restore the states that `capture` returned.

    Raises:
        KeyError, RuntimeError, TypeError, ValueError: if these are not such states.
    """
    torch.set_rng_state(tensors["torch"])
    position, has_gauss = tensors["numpy_place"].tolist()
    keys = tensors["numpy"].numpy().astype(numpy.uint32)
    if not 0 <= position <= _NUMPY_KEYS or keys.shape != (_NUMPY_KEYS,):  # NumPy does not check it
        raise ValueError(f"position {position} of {_NUMPY_KEYS}, keys of shape {list(keys.shape)}")
    numpy.random.set_state(("MT19937", keys, position, has_gauss, float(tensors["numpy_gauss"])))
    gauss_next = float(tensors["python_gauss"])
    random.setstate((3, tuple(tensors["python"].tolist()), None if gauss_next != gauss_next else gauss_next))
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
