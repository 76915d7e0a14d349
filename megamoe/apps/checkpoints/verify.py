"""Whether a checkpoint can be loaded: it is intact, and its files fit each other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megamoe.checkpoint.format import files
from megamoe.checkpoint.format.files import INDEX, shard_file
from megamoe.checkpoint.format.reader import IN_SAFETENSORS, CheckpointReader
from megamoe.errors import UserError, printable

Header = dict[str, tuple[str, list[int]]]  # dtype and shape of a shard file's tensors, by key


def problems(folder: Path, quick: bool = False) -> Iterator[str]:
    """Yield a message for each thing that is wrong; none if it is as saved and its shards are as its index
    says.

    quick: do not read the bytes of tensors.
    """
    intact = True
    for problem in files.problems(folder, shares=0 if quick else 1):
        intact = False
        yield problem
    if not intact:
        return
    try:
        with CheckpointReader(folder) as reader:
            yield from _index_problems(reader)
    except UserError as error:
        yield str(error).removeprefix(f"{folder}/")


def refuse_damaged(folder: Path) -> None:
    """Raise an error if the checkpoint is damaged.

    Raises:
        UserError: with the first problem.
    """
    problem = next(problems(folder), None)
    if problem is not None:
        raise UserError(f"{folder}: damaged: {problem}; name another checkpoint")


def _index_problems(reader: CheckpointReader) -> Iterator[str]:
    expected: dict[int, Header] = {}
    for name, tensor in reader.index["tensors"].items():
        for shard, offsets, sizes in tensor["chunks"]:
            key = reader.chunk_key(name, offsets, sizes)
            expected.setdefault(shard, {})[key] = IN_SAFETENSORS[tensor["dtype"]], list(sizes)
    known = {shard_file(shard) for shard in expected}
    for path in sorted(reader.path.glob("*.safetensors")):
        if path.name not in known:
            yield f"{path.name}: {INDEX} names no tensor in it"
    for shard, header in sorted(expected.items()):
        yield from _header_problems(shard_file(shard), _header(reader, shard), header)


def _header(reader: CheckpointReader, shard: int) -> Header:
    file: Any = reader.shard(shard)
    try:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:  # of an unknown dtype
        raise UserError(f"{shard_file(shard)}: {printable(error)}") from None
    return {key: (it.get_dtype(), it.get_shape()) for key, it in slices.items()}


def _header_problems(name: str, found: Header, expected: Header) -> Iterator[str]:
    for key in sorted(expected.keys() - found.keys()):
        yield f"{name}: {printable(key)} is missing, which {INDEX} says is in it"
    for key in sorted(found.keys() - expected.keys()):
        yield f"{name}: {printable(key)} is not in {INDEX}"
    for key in sorted(found.keys() & expected.keys()):
        if found[key] != expected[key]:
            (dtype, shape), (right, size) = found[key], expected[key]
            yield f"{name}: {printable(key)} is {dtype} {shape}, expected {right} {size}"
