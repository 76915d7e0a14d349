"""A rank's part of a save: a copy in host memory, and a thread that writes it.

The thread writes the rank's shard file and its checksum, and takes part in no collective. The main threads of
the ranks agree that all have written, at a step that the training loop chooses. So no collective runs
concurrently with those of training.
"""

import json
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megamoe.checkpoint.format.files import META, sha256, shard_file
from megamoe.checkpoint.format.reader import chunk_key
from megamoe.checkpoint.planning import Plan, chunk_id
from megamoe.io import sync
from megamoe.parallel.chunks import LocalChunk
from megamoe.parallel.consensus import catch_error

LOOK_EVERY_S = 1.0  # between two looks at how much is written, while the main threads wait for a save
BLOCK_BYTES = 512  # of `st_blocks`, whatever the file system's
PIECE_BYTES = 64 << 20  # of pinned memory, a power of two, in which PyTorch allocates it
NUM_PIECES = 2
IDLE_PRIORITY_S = 60  # for so long the thread runs on otherwise idle cores alone (Linux)


class Staging:
    """Copies in host memory of what is saved, whose memory the next save uses again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._from_device = PinnedPipe()

    def copy(self, groups: Iterable[list[LocalChunk]], plan: Plan) -> dict[str, Tensor]:
        """Copy the chunks that this rank writes; return them by their keys in its shard file."""
        copies: dict[str, Tensor] = {}
        for local_chunks in groups:
            for local in local_chunks:
                if chunk_id(local) in plan.own:
                    key = chunk_key(local.name, local.global_shape, local.chunk.offsets, local.chunk.sizes)
                    copies[key] = self._buffer(key, local.tensor)
                    if local.tensor.is_cuda:
                        self._from_device.copy(local.tensor, copies[key])
                    else:
                        copies[key].copy_(local.tensor)
            self._from_device.finish()  # the next group may use this one's memory
        self._buffers = copies  # frees the buffers of what is no longer saved
        return copies

    def _buffer(self, key: str, tensor: Tensor) -> Tensor:
        known = self._buffers.get(key)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
            return known
        return torch.empty(tensor.shape, dtype=tensor.dtype)


class PinnedPipe:
    """Copies tensors of a GPU to ordinary host memory, piece by piece through two pinned buffers.

    While the GPU fills one buffer, the host empties the other. PyTorch takes a power of two of pinned memory
    for each tensor, up to twice its size, and does not give it back; here it is 2 * PIECE_BYTES a rank,
    whatever is saved.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._under_way: list[tuple[Tensor, Tensor, torch.cuda.Event]] = []  # (buffer, target, when filled)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy a tensor of any strides to a contiguous one in host memory, complete after `finish`."""
        from_bytes, to_bytes = _bytes_of(source.detach().contiguous()), _bytes_of(target)
        for piece, to_piece in zip(from_bytes.split(PIECE_BYTES), to_bytes.split(PIECE_BYTES), strict=True):
            if len(self._under_way) == NUM_PIECES:
                self._empty_one()
            if self._free:
                buffer = self._free.pop()
            else:
                buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            buffer[: len(piece)].copy_(piece, non_blocking=True)
            filled = torch.cuda.Event()
            filled.record()
            self._under_way.append((buffer, to_piece, filled))

    def finish(self) -> None:
        """Wait for all that is under way."""
        while self._under_way:
            self._empty_one()

    def _empty_one(self) -> None:
        buffer, target, filled = self._under_way.pop(0)
        filled.synchronize()
        target.copy_(buffer[: len(target)])
        self._free.append(buffer)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


class Save:
    """Writes a rank's tensors, and on the first rank the JSON files.

    When `is_done`, `problem` is an error or None.
    """

    def __init__(self, folder: Path, final: Path, rank: int) -> None:
        self.folder = folder
        self.final = final
        self.sums: dict[str, str] = {}
        self.problem: str | None = "writing was broken off"  # remains if the thread dies
        self._shard = folder / shard_file(rank)
        self._thread: threading.Thread | None = None
        self._started = 0.0
        self._written = -1

    def start(self, tensors: dict[str, Tensor], texts: dict[str, object]) -> None:
        """Start to write in a thread. texts: the contents of the JSON files, by file name."""
        self._started = time.monotonic()

        def run() -> None:
            _schedule(threading.get_native_id(), "SCHED_IDLE")
            self.problem = catch_error(lambda: self._write(tensors, texts))

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether this rank has written, or failed to. The training loop calls it at every step."""
        if self._thread is None or not self._thread.is_alive():
            return True
        if time.monotonic() - self._started > IDLE_PRIORITY_S:  # training leaves too little time to it
            _schedule(self._thread.native_id, "SCHED_OTHER")
        return False

    def wait(self) -> tuple[bool, bool]:
        """Wait a moment for this rank's writing.

        Returns:
            Whether it still writes, and whether the folder's files have grown since the last call.
        """
        if self._thread is None or not self._thread.is_alive():
            return False, False
        _schedule(self._thread.native_id, "SCHED_OTHER")  # nothing else is to be done
        self._thread.join(LOOK_EVERY_S)
        before, self._written = self._written, self._bytes_written()
        return self._thread.is_alive(), self._written != before

    def _bytes_written(self) -> int:
        """Return the bytes of the folder's files, by their sizes and on the disk.

        safetensors gives its file the final size before it writes.
        """
        with suppress(OSError):
            found = [entry.stat() for entry in os.scandir(self.folder)]
            return sum(file.st_size + file.st_blocks * BLOCK_BYTES for file in found)
        return 0

    def _write(self, tensors: dict[str, Tensor], texts: dict[str, object]) -> None:
        if tensors:
            save_file(tensors, str(self._shard))
            # safetensors makes it readable for the owner alone
            os.chmod(self._shard, self.folder.stat().st_mode & 0o666)
            self._finish(self._shard)
        for name, content in texts.items():
            path = self.folder / name
            path.write_text(json.dumps(content, indent=1 if name == META else None) + "\n", "utf-8")
            self._finish(path)

    def _finish(self, path: Path) -> None:
        sync(path)
        self.sums[path.name] = sha256(path)


def _schedule(thread: int | None, policy: str) -> None:
    """Set the scheduling policy of a thread (SCHED_IDLE: runs on idle cores alone).

    Does nothing but on Linux.
    """
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(thread or 0, getattr(os, policy), os.sched_param(0))
