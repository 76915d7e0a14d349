"""Reading a checkpoint: any chunk of any tensor, whatever chunks it was saved in.

torch.distributed.checkpoint works out which saved chunks a requested chunk overlaps. Slices of the
safetensors files are read.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megamoe.checkpoint.format.files import damaged, is_plain, shard_file
from megamoe.checkpoint.format.meta import DType, Index, check_index, read_index, read_meta
from megamoe.errors import UserError
from megamoe.parallel.chunks import Chunk, LocalChunk, chunk_view, whole_tensor

WEIGHT = "model/"  # prefix of a parameter's or buffer's name
MEAN = "ema/"  # prefix of the exponential mean of a parameter
STEP = "step/"  # prefix of Adam's count of a parameter's updates
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's
MUON_MOMENT = "momentum_buffer"
# The names of `DType`, in its order.
SAFETENSORS_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
IN_SAFETENSORS = dict(zip(get_args(DType), SAFETENSORS_DTYPES, strict=True))


def moment_name(moment: str, parameter: str) -> str:
    """Return the name of the tensor that holds a moment of a parameter."""
    return f"{moment}/{parameter}"


class CheckpointReader(ExitStack):
    """An open checkpoint. Its shard files are opened when they are first read; `close` closes them. After it
    they are opened again when they are read.

    Raises (when built):
        UserError: if its JSON is missing, damaged, of another format, or of two checkpoints.
    """

    def __init__(self, path: Path, key: str = "checkpoint.resume") -> None:
        super().__init__()
        self.path = path
        self.meta = read_meta(path, key)
        self.index: Index = read_index(path)
        check_index(path, self.meta, self.index)
        self._files: dict[int, Any] = {}

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the tensors whose name starts with the prefix."""
        return [name for name in self.index["tensors"] if name.startswith(prefix)]

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor of the checkpoint."""
        return self.index["tensors"][name]["shape"]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor of the checkpoint."""
        return getattr(torch, self.index["tensors"][name]["dtype"])

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor, on the CPU.

        Raises:
            UserError: if a file is missing or damaged. Memory is allocated after the files were checked for
                it.
        """
        for number in range(len(self.index["tensors"][name]["chunks"])):
            self._stored_chunk(name, number)
        filled = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.fill([whole_tensor(name, filled)])
        return filled

    @torch.no_grad()
    def fill(self, local_chunks: Iterable[LocalChunk]) -> None:
        """Read each local chunk from the checkpoint into its memory, cast to the memory's dtype.

        Raises:
            UserError: if a tensor is missing or of another shape, or a file missing or damaged.
        """
        by_name: dict[str, list[LocalChunk]] = {}
        for local in local_chunks:
            by_name.setdefault(local.name, []).append(local)
        for name, wanted in by_name.items():
            self._check(wanted[0])
            self._fill(name, wanted)

    def _check(self, local: LocalChunk) -> None:
        what = local.name.removeprefix(WEIGHT)
        if local.name not in self.index["tensors"]:
            raise UserError(f"{self.path}: {what} is missing; the checkpoint is of another model")
        if self.shape(local.name) != list(local.global_shape):
            raise UserError(
                f"{self.path}: {what} has shape {self.shape(local.name)}, this model needs "
                f"{list(local.global_shape)}; use the configuration that saved it"
            )

    def _fill(self, name: str, wanted: list[LocalChunk]) -> None:
        meta = self.index["tensors"][name]
        stored = TensorStorageMetadata(
            TensorProperties(dtype=self.dtype(name)),
            torch.Size(meta["shape"]),
            [_storage_metadata(Chunk(tuple(offsets), tuple(sizes))) for _, offsets, sizes in meta["chunks"]],
        )
        missing = sum(local.chunk.numel for local in wanted)
        for item in create_read_items_for_chunk_list(
            name, stored, [_storage_metadata(local.chunk) for local in wanted]
        ):
            local = wanted[item.dest_index.index or 0]
            chunk_view(local.tensor, Chunk(tuple(item.dest_offsets), tuple(item.lengths))).copy_(
                self._read(name, item)
            )
            missing -= item.lengths.numel()
        if missing:
            raise damaged(self.path, f"{missing} elements of {name} are in no shard")

    def _read(self, name: str, item: ReadItem) -> Tensor:
        chunk, path = self._stored_chunk(name, item.storage_index.index or 0)
        ends = [o + length for o, length in zip(item.storage_offsets, item.lengths, strict=True)]
        try:
            return chunk[tuple(map(slice, item.storage_offsets, ends)) or ...]
        except (OSError, SafetensorError) as error:
            raise damaged(path, error) from None

    def _stored_chunk(self, name: str, number: int) -> tuple[Any, Path]:
        """Return a sliceable view of a tensor's chunk with that number, and the shard file that holds it."""
        shard, offsets, sizes = self.index["tensors"][name]["chunks"][number]
        key, dtype = self.chunk_key(name, offsets, sizes), self.index["tensors"][name]["dtype"]
        file, path = self.shard(shard), self.path / shard_file(shard)
        try:
            chunk = file.get_slice(key)
        except SafetensorError as error:
            raise damaged(path, error) from None
        found, expected = (chunk.get_dtype(), chunk.get_shape()), (IN_SAFETENSORS[dtype], list(sizes))
        if found != expected:
            raise damaged(path, f"{key} is {found[0]} {found[1]}, expected {expected[0]} {expected[1]}")
        return chunk, path

    def chunk_key(self, name: str, offsets: Iterable[int], sizes: Iterable[int]) -> str:
        """Return the key under which a shard file of this checkpoint holds a chunk of a tensor."""
        return chunk_key(name, self.index["tensors"][name]["shape"], offsets, sizes)

    def shard(self, number: int) -> Any:
        """Return a shard file, opened by safetensors.

        Raises:
            UserError: if it is missing or damaged.
        """
        path = self.path / shard_file(number)
        try:
            if number not in self._files:
                if not is_plain(path):
                    raise damaged(path, "not a plain file")
                self._files[number] = self.enter_context(safe_open(str(path), framework="pt"))
                self.callback(self._files.pop, number)
            return self._files[number]
        except (OSError, SafetensorError) as error:
            raise damaged(path, (isinstance(error, OSError) and error.strerror) or error) from None


def chunk_key(name: str, shape: Iterable[int], offsets: Iterable[int], sizes: Iterable[int]) -> str:
    """Return a chunk's key in its shard file: the tensor's name, and the offsets unless it is the whole."""
    return name if list(shape) == list(sizes) else f"{name}@{','.join(map(str, offsets))}"


def _storage_metadata(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
