"""The JSON files of a checkpoint, read and validated: a checkpoint may come from an untrusted source."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired
from uuid import uuid4

from pydantic import ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megamoe.checkpoint.format.files import FORMAT, INDEX, META, damaged, parse_json, read_bytes, read_json
from megamoe.errors import UserError, printable
from megamoe.io import reason
from megamoe.parallel.chunks import Chunk, first_overlap, most_chunks

LARGEST = (1 << 63) - 1  # the largest size of a tensor, and the largest count
Number = Annotated[int, Field(ge=0, le=LARGEST)]
PositiveNumber = Annotated[int, Field(gt=0, le=LARGEST)]
Numbers = Annotated[list[Number], Field(max_length=64)]  # PyTorch's limit of dimensions
# Attributes of DeepSpeed's dynamic scaler.
ScalerName = Annotated[str, Field(pattern="^(cur_scale|cur_iter|last_overflow_iter|cur_hysteresis)$")]
DType = Literal[
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
]


class LayoutMeta(TypedDict):
    """The parallel layout of the ranks that saved."""

    ranks: PositiveNumber
    tensor: PositiveNumber
    expert: PositiveNumber
    expert_tensor: PositiveNumber
    pipeline: NotRequired[PositiveNumber]
    context: NotRequired[PositiveNumber]
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    precision: Literal["fp32", "bf16", "fp16"]


class SkipPolicyMeta(TypedDict):
    """The state of `SkipPolicy`. losses: of the last applied steps."""

    in_a_row: NotRequired[Number]
    losses: NotRequired[list[FiniteFloat]]


class RoutingHistoryMeta(TypedDict):
    """The state of `RoutingHistory`: of every MoE layer, numbers of its experts."""

    steps: Number
    load: list[list[Number]]
    unused: list[list[Number]]


class Meta(TypedDict):
    """checkpoint.json. step, samples, micro_batches and tokens count over all ranks since the run's start.

    id: of this checkpoint, also in its index; those of earlier versions have none. plugins: the SHA-256 of
    each source file of the run's plugins.
    """

    format: Number
    id: NotRequired[str]
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
    skip_policy: NotRequired[SkipPolicyMeta]
    routing_history: NotRequired[RoutingHistoryMeta]
    plugins: NotRequired[dict[str, str]]


class ShardingMeta(TypedDict):
    """How a parameter is sharded; see `Sharding`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    tensor: NotRequired[tuple[Number, PositiveNumber]]
    expert: NotRequired[bool]
    slices: NotRequired[tuple[Number, PositiveNumber]]


class TensorMeta(TypedDict):
    """A global tensor. chunks: (number of the shard file, offsets, sizes) of each chunk."""

    dtype: DType
    shape: Numbers
    chunks: list[tuple[Number, Numbers, Numbers]]


class Index(TypedDict):
    """index.json. step, id: the checkpoint's. shardings: how each parameter of the model is sharded."""

    step: NotRequired[Number]
    id: NotRequired[str]
    tensors: dict[str, TensorMeta]
    shardings: dict[str, ShardingMeta]


_META, _INDEX = TypeAdapter(Meta), TypeAdapter(Index)


def read_meta(path: Path, key: str = "checkpoint.resume") -> Meta:
    """Return a checkpoint's checkpoint.json. key: the key of the configuration that named it, for messages.

    Raises:
        UserError: if `path` is not a complete checkpoint, or has another format.
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
    try:
        return _META.validate_python(content, strict=True)
    except ValidationError as error:
        raise damaged(path / META, reason(error)) from None


def read_index(path: Path) -> Index:
    """Return a checkpoint's index.json. The chunks of each tensor fill it and do not overlap, and there are
    no more than as many ranks as there are shard files can hold.

    Raises:
        UserError: if the file cannot be read, or is not such an index.
    """
    try:
        text = read_bytes(path / INDEX)
        parse_json(text)  # pydantic does not see keys that appear twice
        index = _INDEX.validate_json(text, strict=True)
    except (OSError, ValueError) as error:
        raise damaged(path / INDEX, reason(error)) from None
    shards = sum(1 for _ in path.glob("shard_*.safetensors"))
    for name, tensor in index["tensors"].items():
        problem = _chunk_problem(tensor, shards)
        if problem:
            raise damaged(path / INDEX, f"{printable(name, 120)}: {problem}")
    return index


def new_id() -> str:
    """Return what a new checkpoint's files have in common, and no other checkpoint has."""
    return uuid4().hex


def check_index(path: Path, meta: Meta, index: Index) -> None:
    """Refuse the index of another checkpoint, which may have the same tensors.

    Raises:
        UserError: if the step or the id is not that of checkpoint.json; both may be missing.
    """
    step = index.get("step", meta["step"])
    if (step, index.get("id")) != (meta["step"], meta.get("id")):
        other = f"step {step}" if step != meta["step"] else "this step"
        raise damaged(path / INDEX, f"of another checkpoint of {other}; {META} is of step {meta['step']}")


def _chunk_problem(tensor: TensorMeta, shards: int) -> str | None:
    """Return what is wrong with the tensor's chunks: they must fill it and not overlap. None: nothing.

    shards: the number of shard files. A rank writes one, with chunks that it holds.
    """
    shape, filled = tensor["shape"], 0
    most = shards * most_chunks(len(shape))
    if len(tensor["chunks"]) > most > 0:  # no shard at all is told when one is read
        return f"{len(tensor['chunks'])} chunks, expected at most {most} (shard files: {shards})"
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
    pair = first_overlap(Chunk(tuple(offsets), tuple(sizes)) for _, offsets, sizes in tensor["chunks"])
    return f"chunks at {[*pair[0].offsets]} and {[*pair[1].offsets]} overlap" if pair else None
