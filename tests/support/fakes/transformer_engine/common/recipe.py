"""The recipes of FP8; like the original's they are pydantic dataclasses, which ignore unknown keywords."""

from enum import Enum

from pydantic.dataclasses import dataclass


class Format(Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class Recipe:
    fp8_format: Format = Format.HYBRID


@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8CurrentScaling(Recipe):
    fp8_dpa: bool = False


@dataclass
class Float8BlockScaling(Recipe):
    pass


@dataclass
class MXFP8BlockScaling(Recipe):
    pass
