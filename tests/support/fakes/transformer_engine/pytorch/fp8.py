"""The context in which products are in FP8, and a record of all products."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..common.recipe import MXFP8BlockScaling


@dataclass
class Call:
    """One product: of which module, in FP8 or not, with how many rows (of each group)."""

    module: Any
    fp8: bool
    rows: list[int]


calls: list[Call] = []


class FP8GlobalStateManager:
    recipe: Any = None
    reason = ""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.recipe

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return not cls.reason, cls.reason

    is_mxfp8_available = is_fp8_block_scaling_available = is_fp8_available

    @classmethod
    def multiple(cls) -> int:
        return 32 if isinstance(cls.recipe, MXFP8BlockScaling) else 16


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
    *,
    recipe: Any = None,
    amax_reduction_group: Any = None,
) -> Iterator[None]:
    before = FP8GlobalStateManager.recipe
    FP8GlobalStateManager.recipe = (fp8_recipe or recipe) if enabled else None
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = before


def fp8_model_init(enabled: bool = True, recipe: Any = None) -> Any:
    raise AssertionError("weights in FP8 are not asked for")
