"""One save under way: copied at once, written by a thread of its own, published when all ranks have written.

The thread of a rank writes that rank's file and its checksum, and talks to nobody. The ranks agree in their
main threads, at a step that the training loop chooses, so that no collective runs beside those of training.
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

from megamoe.checkpoint.format.boxes import Piece
from megamoe.checkpoint.format.files import META, shard_file, sync
from megamoe.checkpoint.format.integrity import sha256
from megamoe.checkpoint.format.reader import chunk_key
from megamoe.checkpoint.planning import Plan, place_of
from megamoe.parallel.consensus import catch_error

PATIENCE_S = 60  # for which a writer takes only the time that training leaves (Linux)


class Staging:
    """Copies in host memory, which the next save uses again; pinned where they come from a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, groups: Iterable[list[Piece]], plan: Plan) -> dict[str, Tensor]:
        """This rank's part of the plan, by the keys of its file."""
        taken: dict[str, Tensor] = {}
        on_device = False
        for pieces in groups:
            for piece in pieces:
                if place_of(piece) in plan.mine:
                    key = chunk_key(piece.name, piece.shape, piece.box.offsets, piece.box.sizes)
                    taken[key] = self._buffer(key, piece.tensor)
                    taken[key].copy_(piece.tensor, non_blocking=piece.tensor.is_cuda)
                    on_device = on_device or piece.tensor.is_cuda
            if on_device:  # the next group may take this one's memory
                torch.cuda.synchronize()
        self._buffers = taken  # what is saved no more is let go
        return taken

    def _buffer(self, key: str, tensor: Tensor) -> Tensor:
        known = self._buffers.get(key)
        if known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype:
            return known
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class Save:
    """Writing a rank's tensors, and on the first rank the JSON beside them; `wait`, then ask `problem`."""

    def __init__(self, folder: Path, final: Path, rank: int) -> None:
        self.folder = folder
        self.final = final
        self.sums: dict[str, str] = {}
        self.problem: str | None = "writing was broken off"  # as it stays where the thread dies
        self._shard = folder / shard_file(rank)
        self._thread: threading.Thread | None = None
        self._started = 0.0

    def start(self, tensors: dict[str, Tensor], texts: dict[str, object]) -> None:
        """Begin to write in a thread."""
        self._started = time.monotonic()
        self._thread = threading.Thread(
            target=lambda: self._run_aside(tensors, texts), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run_aside(self, tensors: dict[str, Tensor], texts: dict[str, object]) -> None:
        _schedule(threading.get_native_id(), "SCHED_IDLE")
        self.run(tensors, texts)

    def run(self, tensors: dict[str, Tensor], texts: dict[str, object]) -> None:
        """Write; texts: what goes into the JSON files, by name."""
        self.problem = catch_error(lambda: self._write(tensors, texts))

    @property
    def is_done(self) -> bool:
        """Whether this rank has written, or failed to. Asked at every step."""
        if self._thread is None or not self._thread.is_alive():
            return True
        if time.monotonic() - self._started > PATIENCE_S:  # training leaves it too little
            _schedule(self._thread.native_id, "SCHED_OTHER")
        return False

    def wait(self) -> None:
        """Until this rank has written, or failed to."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, tensors: dict[str, Tensor], texts: dict[str, object]) -> None:
        if tensors:
            save_file(tensors, str(self._shard))
            os.chmod(self._shard, self.folder.stat().st_mode & 0o666)  # safetensors lets nobody else read
            self._finish(self._shard)
        for name, content in texts.items():
            path = self.folder / name
            path.write_text(json.dumps(content, indent=1 if name == META else None) + "\n", "utf-8")
            self._finish(path)

    def _finish(self, path: Path) -> None:
        sync(path)
        self.sums[path.name] = sha256(path)


def _schedule(thread: int | None, policy: str) -> None:
    """SCHED_IDLE: only where a core has nothing else to do. On Linux, by a thread's own number."""
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(thread or 0, getattr(os, policy), os.sched_param(0))
