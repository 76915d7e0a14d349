"""What a checkpoint's JSON says, checked: it may come from anywhere."""

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megamoe.errors import UserError
from megamoe.parallel.checkpoints.files import FORMAT, INDEX, META, damaged, read_json

PositiveNumber = Annotated[int, Field(gt=0)]
Numbers = list[NonNegativeInt]
DType = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]


class LayoutMeta(TypedDict):
    """Of the ranks that saved."""

    ranks: PositiveNumber
    tensor: PositiveNumber
    expert: PositiveNumber
    expert_tensor: PositiveNumber
    zero_stage: NonNegativeInt
    precision: Literal["fp32", "bf16", "fp16"]


class Meta(TypedDict):
    """checkpoint.json. step, samples, micro_batches, tokens: so far, over all ranks."""

    format: NonNegativeInt
    saved_at: str
    step: NonNegativeInt
    samples: NonNegativeInt
    micro_batches: NonNegativeInt
    skipped_steps: NonNegativeInt
    tokens: NonNegativeInt
    vocabulary: PositiveNumber
    layout: LayoutMeta
    loss_scaler: dict[str, FiniteFloat]
    config: dict[str, Any]
    broken_steps: NotRequired[dict[str, Any]]


class ShardingMeta(TypedDict):
    """See `placements.Sharding`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    tensor: NotRequired[tuple[NonNegativeInt, PositiveNumber]]
    expert: NotRequired[bool]
    slices: NotRequired[tuple[NonNegativeInt, PositiveNumber]]


class TensorMeta(TypedDict):
    """A logical tensor. chunks: (number of the shard, offsets, sizes) of each box of it."""

    dtype: DType
    shape: Numbers
    chunks: list[tuple[NonNegativeInt, Numbers, Numbers]]


class Index(TypedDict):
    """index.json. shardings: of the model's parameters, how layouts cut them."""

    tensors: dict[str, TensorMeta]
    shardings: dict[str, ShardingMeta]


_META, _INDEX = TypeAdapter(Meta), TypeAdapter(Index)


def read_meta(path: Path, key: str = "checkpoint.resume") -> Meta:
    """A checkpoint's own words; `key` of the configuration named it.

    Raises:
        UserError: if `path` is no complete checkpoint, or one of another format.
    """
    try:
        content = read_json(path / META)
    except (OSError, ValueError):
        raise UserError(
            f"{key}: {path} is not a complete checkpoint (no readable {META}); name a step_* folder"
            + (", or auto" if key == "checkpoint.resume" else "")
        ) from None
    if content.get("format") != FORMAT:
        raise UserError(
            f"{path}: checkpoint format {content.get('format')}, this version reads {FORMAT}; load it with "
            "the version that saved it"
        )
    try:
        return _META.validate_python(content, strict=True)
    except ValidationError as error:
        raise damaged(path / META, _words(error)) from None


def read_index(path: Path) -> Index:
    """Which tensors a checkpoint has, and where.

    Raises:
        UserError: if it cannot be read, or is no such index.
    """
    try:
        index = _INDEX.validate_json((path / INDEX).read_bytes())
    except ValidationError as error:
        raise damaged(path / INDEX, _words(error)) from None
    except OSError as error:
        raise damaged(path / INDEX, error.strerror) from None
    for name, tensor in index["tensors"].items():
        problem = _misfit(tensor)
        if problem:
            raise damaged(path / INDEX, f"{name}: {problem}")
    return index


def _misfit(tensor: TensorMeta) -> str | None:
    """Why the chunks are not the tensor's, which they must fill."""
    shape, filled = tensor["shape"], 0
    for _, offsets, sizes in tensor["chunks"]:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"a chunk of {len(offsets)} dimensions in shape {shape}"
        if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            return f"a chunk at {offsets} of {sizes} outside shape {shape}"
        filled += _volume(sizes)
    return None if filled == _volume(shape) else f"chunks of {filled} elements for shape {shape}"


def _volume(sizes: list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _words(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
