"""Rotary positions: their frequencies, also for sequences longer than trained with, and the passes that
apply them.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from megamoe.kernels.autograd import Function, once_differentiable
from megamoe.kernels.choice import Kernels, RowKernels

if TYPE_CHECKING:
    from megamoe.kernels.triton import TritonKernels


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor` (Chen et al. 2023, position interpolation)."""

    factor: float
    concentration: ClassVar[float] = 1.0

    def scaled(self, frequency_R: Tensor, base: float) -> Tensor:
        """Return the scaled frequencies, fp32 [R / 2]."""
        return frequency_R / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones as they are, and a blend between them (Llama 3.1).

    A frequency is low if its wave is longer than original_length / low_frequency_factor, and high if it is
    shorter than original_length / high_frequency_factor.
    """

    factor: float
    original_length: int
    low_frequency_factor: float
    high_frequency_factor: float
    concentration: ClassVar[float] = 1.0

    def scaled(self, frequency_R: Tensor, base: float) -> Tensor:
        """Return the scaled frequencies, fp32 [R / 2]."""
        low, high = self.low_frequency_factor, self.high_frequency_factor
        wave_R = 2 * math.pi / frequency_R
        kept_R = (self.original_length / wave_R - low) / (high - low)
        blend_R = (1 - kept_R) * frequency_R / self.factor + kept_R * frequency_R
        longer_R = torch.where(wave_R > self.original_length / low, frequency_R / self.factor, blend_R)
        return torch.where(wave_R < self.original_length / high, frequency_R, longer_R)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, section 3): frequencies between kept and divided by `factor`, by their turns.

    A pair that turns more than `beta_fast` times in original_length positions keeps its frequency, and one
    that turns less than `beta_slow` times has it divided. truncate: the bounds are whole pairs. mscale,
    mscale_all_dim: DeepSeek's two factors of cosine and sine, whose quotient counts; None or 0: YaRN's own
    factor. attention_factor: replaces both.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def concentration(self) -> float:
        """The factor of cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)

    def scaled(self, frequency_R: Tensor, base: float) -> Tensor:
        """Return the scaled frequencies, fp32 [R / 2]."""
        columns = 2 * len(frequency_R)
        first, last = (self._pair_of(turns, columns, base) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, columns - 1)
        pair_R = torch.arange(len(frequency_R), dtype=torch.float32, device=frequency_R.device)
        width = last - first or 0.001
        kept_R = 1 - ((pair_R - first) / width).clamp(0, 1)
        return frequency_R / self.factor * (1 - kept_R) + frequency_R * kept_R

    def _pair_of(self, turns: float, columns: int, base: float) -> float:
        """Return the pair, as a real number, that turns so often in the original length."""
        positions = self.original_length / (turns * 2 * math.pi)
        return columns * math.log(positions) / (2 * math.log(base))


Scaling = LinearScaling | Llama3Scaling | YarnScaling


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return 0.1 * mscale * ln(factor) + 1, or 1 for a factor up to 1 (Peng et al. 2023, equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True)
class Rotary:
    """How heads rotate with their position: column pair i at position s by the angle s * base^(-2i / R).

    share: of a head's columns, from the first, that rotate: R = int(share * D); the others stay as they are.
    interleaved: a pair is the columns 2i and 2i + 1; else i and i + R/2. An interleaved pair is written to
    the columns i and i + R/2: queries and keys are permuted alike, and their products do not change.
    scaling: of the frequencies, for longer sequences.
    """

    base: float
    share: float = 1.0
    interleaved: bool = False
    scaling: Scaling | None = None

    def columns(self, size: int) -> int:
        """Return R for heads of `size` columns; ValueError if it is odd."""
        columns = int(size * self.share)
        if columns % 2:
            of = "" if columns == size else f", of which {columns} turn"
            raise ValueError(f"rotary positions turn columns in pairs: found heads of {size}{of}")
        return columns

    def rotates_halves(self, size: int) -> bool:
        """Whether all columns rotate, each with the one half a head away: the kernels' form."""
        return not self.interleaved and self.columns(size) == size

    @property
    def attention_factor(self) -> float:
        """The factor of cosine and sine, and so of each rotated query and key; 1 but for YaRN."""
        return 1.0 if self.scaling is None else self.scaling.concentration

    def inverse_frequencies(self, size: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the angle of each pair at position 1, fp32 [R / 2], for heads of `size` columns."""
        columns = self.columns(size)
        powers = torch.arange(0, columns, 2, device=device, dtype=torch.float32) / columns
        frequency_R = 1.0 / float(self.base) ** powers
        return frequency_R if self.scaling is None else self.scaling.scaled(frequency_R, float(self.base))


def apply_rotary(heads_SBND: Tensor, rotary: Rotary, kernels: Kernels) -> Tensor:
    """Rotate queries or keys by their positions 0 .. S-1; [S, B, heads, D] to the same shape.

    Angles and arithmetic are fp32. A kernel's result is a view of memory in the order [B, heads, S, D].

    Raises:
        ValueError: if the number of columns that rotate is odd.
    """
    return _rotated(heads_SBND, rotary, angles_of(heads_SBND, len(heads_SBND), rotary), kernels)


def apply_rotary_at(
    heads_SBND: Tensor, place_SB: Tensor, longest: int, rotary: Rotary, kernels: Kernels
) -> Tensor:
    """Rotate heads as `apply_rotary`, each by its own position. place_SB: integers below `longest`."""
    length, batch, heads, size = heads_SBND.shape
    tables = angles_of(heads_SBND, longest, rotary)
    cosine_TR, sine_TR = (table_SR[place_SB.flatten()] for table_SR in tables)
    one_sequence = heads_SBND.reshape(length * batch, 1, heads, size)
    rotated_T1ND = _rotated(one_sequence, rotary, (cosine_TR, sine_TR), kernels)
    return rotated_T1ND.reshape(length, batch, heads, size)


def apply_rotary_qk(
    query_SBND: Tensor, key_SBND: Tensor, value_SBND: Tensor, rotary: Rotary, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys as `apply_rotary` does; return them and the values.

    By Triton's kernels the rotated heads are contiguous, and for three tensors of one shape the gradients are
    slices of one tensor [S, B, heads, 3 D], so that `split_heads` need not copy them together.
    """
    chosen = kernels.rows_on(query_SBND.device) if kernels.uses_triton(query_SBND.device) else None
    library = cast("TritonKernels | None", chosen)
    alike = query_SBND.dtype == key_SBND.dtype and rotary.rotates_halves(query_SBND.shape[-1])
    if library is None or query_SBND.dtype not in library.dtypes or not alike:
        return apply_rotary(query_SBND, rotary, kernels), apply_rotary(key_SBND, rotary, kernels), value_SBND
    tables = angles_of(query_SBND, len(query_SBND), rotary)
    return _ApplyRotaryQK.apply(query_SBND, key_SBND, value_SBND, *tables, library)


def angles_of(heads: Tensor, length: int, rotary: Rotary) -> tuple[Tensor, Tensor]:
    """Return `angles` for heads [..., D] at positions below `length`."""
    return angles(length, heads.shape[-1], rotary, heads.device)


@lru_cache(maxsize=8)
def angles(length: int, size: int, rotary: Rotary, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine times `rotary.attention_factor`, fp32 [S, R / 2] each.

    Raises:
        ValueError: if the number of columns that rotate is odd.
    """
    position_S = torch.arange(length, device=device, dtype=torch.float32)
    angle_SR = torch.outer(position_S, rotary.inverse_frequencies(size, device))
    cosine_SR, sine_SR, factor = angle_SR.cos(), angle_SR.sin(), rotary.attention_factor
    return (cosine_SR, sine_SR) if factor == 1.0 else (cosine_SR * factor, sine_SR * factor)


def _rotated(heads_SBND: Tensor, rotary: Rotary, tables: tuple[Tensor, Tensor], kernels: Kernels) -> Tensor:
    size = heads_SBND.shape[-1]
    if rotary.rotates_halves(size):
        return rotate_half(heads_SBND, *tables, kernels)
    columns = rotary.columns(size)
    rotated, rest = heads_SBND[..., :columns], heads_SBND[..., columns:]
    if rotary.interleaved:
        rotated = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((rotate_half(rotated, *tables, kernels), rest), dim=-1)


def rotate_half(heads_SBND: Tensor, cosine_SD: Tensor, sine_SD: Tensor, kernels: Kernels) -> Tensor:
    """Rotate the halves of heads by the given angles, fp32 [S, D / 2]."""
    library = kernels.rows_on(heads_SBND.device)
    if library is None or heads_SBND.dtype not in library.dtypes:
        return plain_rotate_half(heads_SBND, cosine_SD, sine_SD)
    return _ApplyRotary.apply(heads_SBND, cosine_SD, sine_SD, library)


def plain_rotate_half(heads_SBND: Tensor, cosine_SD: Tensor, sine_SD: Tensor) -> Tensor:
    """Compute `rotate_half` by PyTorch's operators."""
    wide = torch.promote_types(heads_SBND.dtype, torch.float32)
    first, second = heads_SBND.to(wide).chunk(2, dim=-1)
    cosine, sine = cosine_SD[:, None, None], sine_SD[:, None, None]
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return rotated.to(heads_SBND.dtype)


class _ApplyRotaryQK(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cosine_SD: Tensor,
        sine_SD: Tensor,
        library: "TritonKernels",
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.angles, ctx.library = (cosine_SD, sine_SD), library
        rotated = query.new_empty(query.shape), key.new_empty(key.shape)
        _rotate_two((query, key), rotated, ctx.angles, 1.0, library)
        return *rotated, value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *sent: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = gradients_of(*sent)
        _rotate_two(sent[:2], (query, key), ctx.angles, -1.0, ctx.library)
        return query, key, value.copy_(sent[2]), None, None, None


def gradients_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors for the gradients of heads [S, B, heads, D].

    For equal shapes they are adjacent in memory, as one projection's heads are.
    """
    if query.shape != key.shape:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    to_query, to_key, to_value = query.new_empty(*query.shape[:3], 3 * query.shape[3]).chunk(3, dim=-1)
    return to_query, to_key, to_value


class _ApplyRotary(Function):
    @staticmethod
    def forward(
        ctx: Any, heads_SBND: Tensor, cosine_SD: Tensor, sine_SD: Tensor, library: RowKernels
    ) -> Tensor:
        ctx.angles, ctx.library = (cosine_SD, sine_SD), library
        length, batch, heads, size = heads_SBND.shape
        rotated_BNSD = heads_SBND.new_empty(batch, heads, length, size)
        return _rotate(heads_SBND, rotated_BNSD.permute(2, 0, 1, 3), ctx.angles, 1.0, library)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SBND: Tensor) -> tuple[Tensor, None, None, None]:
        output_SBND = gradient_SBND.new_empty(gradient_SBND.shape)
        return _rotate(gradient_SBND, output_SBND, ctx.angles, -1.0, ctx.library), None, None, None


def _rotate_two(
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, Tensor],
    angles: tuple[Tensor, Tensor],
    sign: float,
    library: "TritonKernels",
) -> None:
    """Rotate queries and keys; in one launch if they are of one shape."""
    query, key = (each if each.stride(-1) == 1 else each.contiguous() for each in inputs)
    if query.shape == key.shape:
        library.rotate_both(query, key, *outputs, *angles, sign)
    else:
        _rotate(query, outputs[0], angles, sign, library)
        _rotate(key, outputs[1], angles, sign, library)


def _rotate(
    heads_SBND: Tensor, output_SBND: Tensor, angles: tuple[Tensor, Tensor], sign: float, library: RowKernels
) -> Tensor:
    if heads_SBND.stride(-1) != 1:
        heads_SBND = heads_SBND.contiguous()
    length, batch, heads, size = heads_SBND.shape
    sizes = (length, batch, heads, size // 2)
    (from_s, from_b, from_n, _), (to_s, to_b, to_n, _) = heads_SBND.stride(), output_SBND.stride()
    operands = (heads_SBND, from_s, from_b, from_n, output_SBND, to_s, to_b, to_n)
    library.rotate(*operands, *sizes, *angles, sign)
    return output_SBND
