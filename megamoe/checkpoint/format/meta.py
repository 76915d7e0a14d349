"""What a checkpoint's JSON says, checked: it may come from anywhere."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megamoe.checkpoint.format.files import FORMAT, INDEX, META, damaged, parse_json, read_bytes, read_json
from megamoe.checkpoint.format.overlap import first_overlap
from megamoe.config.renamed import with_new_names
from megamoe.errors import UserError, printable

LARGEST = (1 << 63) - 1  # that a tensor's size or a count can be
Number = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveNumber = Annotated[int, Field(gt=0, le=LARGEST)]
Numbers = Annotated[list[Number], Field(max_length=64)]  # PyTorch's limit of dimensions
ScalerName = Annotated[
    str, Field(pattern="^(cur_scale|cur_iter|last_overflow_iter|cur_hysteresis)$")
]  # attributes of DeepSpeed's dynamic scaler
# Parts of tensors' names in checkpoints of earlier versions, and what they are now.
RENAMED = {".router.gate.": ".router.score_function.", ".router.restrictions.": ".router.masks."}
DType = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]


class LayoutMeta(TypedDict):
    """Of the ranks that saved."""

    ranks: PositiveNumber
    tensor: PositiveNumber
    expert: PositiveNumber
    expert_tensor: PositiveNumber
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    precision: Literal["fp32", "bf16", "fp16"]


class RandomLayout(TypedDict):
    """Of the ranks whose random states are in the checkpoint."""

    ranks: PositiveNumber
    tensor: PositiveNumber


class BrokenStepsMeta(TypedDict):
    """What the rules for broken steps remember; losses: of applied steps."""

    in_a_row: NotRequired[Number]
    losses: NotRequired[list[FiniteFloat]]


class Meta(TypedDict):
    """checkpoint.json. step, samples, micro_batches, tokens: so far, over all ranks.

    random_layout: of whom the random states are, where the checkpoint was cut anew for another `layout`.
    """

    format: Number
    saved_at: str
    step: Number
    samples: Number
    micro_batches: Number
    skipped_steps: Number
    tokens: Number
    vocabulary: PositiveNumber
    layout: LayoutMeta
    loss_scaler: dict[ScalerName, FiniteFloat]
    config: dict[str, Any]
    skip_policy: NotRequired[BrokenStepsMeta]
    random_layout: NotRequired[RandomLayout]


class ShardingMeta(TypedDict):
    """See `placements.Sharding`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    tensor: NotRequired[tuple[Number, PositiveNumber]]
    expert: NotRequired[bool]
    slices: NotRequired[tuple[Number, PositiveNumber]]


class TensorMeta(TypedDict):
    """A logical tensor. chunks: (number of the shard, offsets, sizes) of each box of it.

    stored_name: the name inside the shards. `read_index` sets it where an earlier version wrote another one.
    """

    dtype: DType
    shape: Numbers
    chunks: list[tuple[Number, Numbers, Numbers]]
    stored_name: NotRequired[str]


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
    except (OSError, ValueError) as error:
        problem = str(error) if type(error) is ValueError else f"no readable {META}"
        raise UserError(
            f"{key}: {path} is not a complete checkpoint ({printable(problem)}); name a step_* folder"
            + (", or auto" if key == "checkpoint.resume" else "")
        ) from None
    found = content.get("format")
    if found != FORMAT:
        raise UserError(
            f"{path}: checkpoint format {printable(found, 40)}, this version reads {FORMAT}; load it with "
            "the version that saved it"
        )
    if "skip_policy" not in content and "broken_steps" in content:  # its name in earlier versions
        content["skip_policy"] = content.pop("broken_steps")
    try:
        meta = _META.validate_python(content, strict=True)
    except ValidationError as error:
        raise damaged(path / META, _words(error)) from None
    return {**meta, "config": with_new_names(meta["config"])}


def read_index(path: Path) -> Index:
    """Which tensors a checkpoint has, and where: each is filled by its chunks, which do not overlap.

    Raises:
        UserError: if it cannot be read, or is no such index.
    """
    try:
        text = read_bytes(path / INDEX)
        parse_json(text)  # which sees keys that stand there twice
        index = _INDEX.validate_json(text, strict=True)
    except ValidationError as error:
        raise damaged(path / INDEX, _words(error)) from None
    except OSError as error:
        raise damaged(path / INDEX, error.strerror) from None
    except ValueError as error:
        raise damaged(path / INDEX, error) from None
    for name, tensor in index["tensors"].items():
        problem = _misfit(tensor)
        if problem:
            raise damaged(path / INDEX, f"{printable(name, 120)}: {problem}")
    tensors = {_new_name(name): _with_stored_name(name, tensor) for name, tensor in index["tensors"].items()}
    return {
        "tensors": tensors,
        "shardings": {_new_name(name): sharding for name, sharding in index["shardings"].items()},
    }


def _new_name(name: str) -> str:
    """The present name of a tensor that an earlier version may have saved."""
    for old_part, new_part in RENAMED.items():
        name = name.replace(old_part, new_part)
    return name


def _with_stored_name(name: str, tensor: TensorMeta) -> TensorMeta:
    """An entry of index.json that knows its name inside the shards, where that is not the present one."""
    tensor.pop("stored_name", None)
    return tensor if name == _new_name(name) else {**tensor, "stored_name": name}


def _misfit(tensor: TensorMeta) -> str | None:
    """Why the chunks are not the tensor's, which they must fill."""
    shape, filled = tensor["shape"], 0
    if math.prod(size or 1 for size in shape) > LARGEST >> 4:  # in bytes
        return f"shape {shape} has too many elements"
    for _, offsets, sizes in tensor["chunks"]:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"a chunk of {len(offsets)} offsets and {len(sizes)} sizes in shape {shape}"
        if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            return f"a chunk at {offsets} of {sizes} outside shape {shape}"
        filled += math.prod(sizes)
    if filled != math.prod(shape):
        return f"chunks of {filled} elements for shape {shape}"
    pair = first_overlap([(offsets, sizes) for _, offsets, sizes in tensor["chunks"]])
    return f"chunks at {pair[0]} and {pair[1]} overlap" if pair else None


def _words(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{printable('.'.join(map(str, first['loc'])), 120)}: {first['msg']}"
