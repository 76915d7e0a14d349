"""Whether a checkpoint can be loaded: whole, and its parts fit each other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megamoe.checkpoint.format import integrity
from megamoe.checkpoint.format.files import INDEX, shard_file
from megamoe.checkpoint.format.reader import IN_SAFETENSORS, Saved
from megamoe.errors import UserError, printable

Header = dict[str, tuple[str, list[int]]]  # of a shard: dtype and shape by key


def problems(folder: Path, quick: bool = False) -> Iterator[str]:
    """What is wrong, in words; none: it is as it was saved, and its shards hold what its index says.

    quick: the bytes of tensors are not read.
    """
    sound = True
    for problem in integrity.small_problems(folder) if quick else integrity.problems(folder):
        sound = False
        yield problem
    if not sound:
        return
    try:
        with Saved(folder) as saved:
            yield from _misfits(saved)
    except UserError as error:
        yield str(error).removeprefix(f"{folder}/")


def refuse_damaged(folder: Path) -> None:
    """Return if nothing is wrong.

    Raises:
        UserError: naming the first problem.
    """
    problem = integrity.first(problems(folder))
    if problem is not None:
        raise UserError(f"{folder}: damaged: {problem}; name another checkpoint")


def _misfits(saved: Saved) -> Iterator[str]:
    wanted: dict[int, Header] = {}
    for name, tensor in saved.index["tensors"].items():
        for shard, offsets, sizes in tensor["chunks"]:
            key = saved.chunk_key(name, offsets, sizes)
            wanted.setdefault(shard, {})[key] = IN_SAFETENSORS[tensor["dtype"]], list(sizes)
    known = {shard_file(shard) for shard in wanted}
    for path in sorted(saved.path.glob("*.safetensors")):
        if path.name not in known:
            yield f"{path.name}: {INDEX} knows of no tensor in it"
    for shard, header in sorted(wanted.items()):
        yield from _header_misfits(shard_file(shard), _header(saved, shard), header)


def _header(saved: Saved, shard: int) -> Header:
    file: Any = saved.shard(shard)
    try:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:  # a dtype of its own
        raise UserError(f"{shard_file(shard)}: {printable(error)}") from None
    return {key: (it.get_dtype(), it.get_shape()) for key, it in slices.items()}


def _header_misfits(name: str, found: Header, wanted: Header) -> Iterator[str]:
    for key in sorted(wanted.keys() - found.keys()):
        yield f"{name}: {printable(key)} is missing, which {INDEX} says is in it"
    for key in sorted(found.keys() - wanted.keys()):
        yield f"{name}: {INDEX} knows nothing of {printable(key)}"
    for key in sorted(found.keys() & wanted.keys()):
        if found[key] != wanted[key]:
            (dtype, shape), (right, size) = found[key], wanted[key]
            yield f"{name}: {printable(key)} is {dtype} {shape}, expected {right} {size}"
