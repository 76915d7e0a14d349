"""How rotary frequencies change for sequences longer than a model was first trained with.

The names and the formulas are those of transformers' `ROPE_INIT_FUNCTIONS`. R: columns of a head that turn.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


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
