"""Folders whose weights are quantised: they are read as if they held the weights in their dtype.

fp8     block FP8 of DeepSeek-V3: <name> in E4M3 and <name>_scale_inv, a factor for each block of 128 x 128
mxfp4   MXFP4 of gpt-oss (OCP Microscaling Formats 1.0): <name>_blocks with two E2M1 values in a byte, the low
        half first, and <name>_scales, the exponent of two, plus 127, of each 32 values in a row. Both are of
        the transposed tensor.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megamoe.apps.checkpoints.stream import Stored
from megamoe.apps.hf.folder import CONFIG, Folder, short
from megamoe.apps.hf.keys import Json
from megamoe.apps.hf.tensor_files import Shape
from megamoe.errors import UserError

KEY = "quantization_config"
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127
E4M3 = ("e4m3", "float8_e4m3fn")  # names of one format
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Dequantised:
    """A folder with a `quantization_config` as its weights in their dtype; the attributes are `Folder`'s.

    Raises (when built):
        UserError: if the quantisation is none of those above, or tensors do not fit each other.
    """

    def __init__(self, folder: Folder) -> None:
        self.path, self._folder = folder.path, folder
        self.config = {name: value for name, value in folder.config.items() if name != KEY}
        self.tensors = dict(folder.tensors)
        self._made: dict[str, Callable[[], Tensor]] = {}
        options = folder.config[KEY]
        self.dtype = _dtype_of(folder)
        method = options.get("quant_method") if isinstance(options, dict) else options
        kinds: dict[Any, Callable[[Json], None]] = {"fp8": self._find_fp8, "mxfp4": self._find_mxfp4}
        if not isinstance(options, dict) or not isinstance(method, str) or method not in kinds:
            raise UserError(
                f"{self.path / CONFIG}: {KEY}: found {short(str(method))}, expected one of {', '.join(kinds)}"
            )
        kinds[method](options)

    def read(self, name: str) -> Tensor:
        """Return a tensor of `tensors`."""
        return self._made[name]() if name in self._made else self._folder.read(name)

    def _find_fp8(self, options: Json) -> None:
        size = options.get("weight_block_size")
        whole = isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
        if not whole or options.get("fmt", E4M3[0]) not in E4M3:
            raise UserError(
                f"{self.path / CONFIG}: {KEY}: expected fmt {' or '.join(E4M3)} and a weight_block_size of "
                f"two numbers, found {short(str(options.get('fmt')))} and {short(str(size))}"
            )
        rows, columns = size  # type: ignore[misc]
        for name, stored in self._folder.tensors.items():
            if stored.dtype is not torch.float8_e4m3fn:
                continue
            if len(stored.shape) != 2:
                raise UserError(
                    f"{self.path}: {short(name)} is E4M3 of shape {list(stored.shape)}, expected a matrix"
                )
            blocks = (math.ceil(stored.shape[0] / rows), math.ceil(stored.shape[1] / columns))
            self._check_part(name + SCALE, blocks, FLOATS)
            self._put(
                name,
                stored.shape,
                (name, name + SCALE),
                lambda weight, scale: from_blocks(weight, scale, (rows, columns), self.dtype),
            )

    def _find_mxfp4(self, options: Json) -> None:
        for part, stored in self._folder.tensors.items():
            if not part.endswith(BLOCKS):
                continue
            name = part.removesuffix(BLOCKS)
            if len(stored.shape) != 4 or stored.dtype is not torch.uint8:
                raise UserError(
                    f"{self.path}: {short(part)} has shape {list(stored.shape)}, expected bytes in four "
                    "dimensions"
                )
            experts, rows, groups, half = stored.shape
            self._check_part(name + SCALES, (experts, rows, groups), (torch.uint8,))
            self._put(
                name,
                (experts, groups * half * 2, rows),
                (part, name + SCALES),
                lambda blocks, scales: from_mxfp4(blocks, scales, self.dtype),
            )

    def _check_part(self, name: str, shape: Shape, dtypes: tuple[torch.dtype, ...]) -> None:
        found = self._folder.tensors.get(name)
        if found is None or found.shape != shape or found.dtype not in dtypes:
            what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise UserError(
                f"{self.path}: {short(name)}: found {what}, expected factors of shape {list(shape)}"
            )

    def _put(self, name: str, shape: Shape, parts: tuple[str, ...], make: Callable[..., Tensor]) -> None:
        for part in parts:
            del self.tensors[part]
        self.tensors[name] = Stored(self.dtype, shape)
        self._made[name] = lambda: make(*(self._folder.read(part) for part in parts))


Weights = Folder | Dequantised


def weights_of(folder: Folder) -> Weights:
    """Return the folder, or the view of one that is quantised."""
    return Dequantised(folder) if folder.config.get(KEY) is not None else folder


def from_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """[R, C] in E4M3 and a factor for each block of it, [R / block, C / block] -> [R, C]."""
    rows, columns = weight.shape
    whole = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * whole).to(dtype)


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [E, R, G, 16] and [E, R, G] -> [E, 32 G, R], exact in bfloat16."""
    experts, rows, groups, half = blocks.shape
    values = torch.tensor(E2M1, dtype=dtype)
    found = torch.empty(experts, groups * half * 2, rows, dtype=dtype)
    for expert in range(experts):
        low, high = (blocks[expert] & 15).int(), (blocks[expert] >> 4).int()
        pairs = torch.stack((values[low], values[high]), dim=-1).flatten(-2)
        exponents = scales[expert].int()[..., None] - EXPONENT_BIAS
        found[expert] = torch.ldexp(pairs, exponents).to(dtype).flatten(1).T
    return found


def _dtype_of(folder: Folder) -> torch.dtype:
    name = folder.config.get("dtype", folder.config.get("torch_dtype", "bfloat16"))
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if found not in FLOATS:
        raise UserError(f"{folder.path / CONFIG}: dtype: found {short(str(name))}, expected bfloat16")
    return found
