"""Files in object storage, read through blocks that are kept on a local disk.

What stands for the file NAME in a folder of local copies (`stored.py` makes it):

NAME.remote           its URL, size, blocks and their checksums, as JSON
NAME.blocks/00000012  a block; it appears in one move, when it is complete, checked and on the disk
NAME.locks            byte i is locked by the process that fetches block i

All processes of a machine share the blocks. Each compares a block with its checksum when it first reads it,
and again when the file has changed. A block that is damaged, half there or deleted is fetched again.
`block_cache.py` keeps them within a limit.
"""

import fcntl
import hashlib
import json
import os
import stat
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from megamoe.data.block_cache import BLOCKS, BlockCache, locked_byte, touch
from megamoe.data.remote import told
from megamoe.errors import UserError, printable
from megamoe.io import read_plain, reason, replace_file
from megamoe.object_storage import WAITS_S, attempt, open_system, without_credentials

BLOCK_BYTES = 8 << 20
DIGITS = 16  # hexadecimal digits of each block's SHA-256
WITHIN_S = 200.0  # a loader process that waits longer than loader.WORKER_TIMEOUT_S counts as hanging
TOUCH_S = 60.0  # how exactly the time of a block's last use is known
FILL_STREAMS = 4  # blocks that are fetched ahead at a time
REMOTE, LOCKS, FILLING = ".remote", ".locks", ".filling"
TAGS, TIMES = ("ETag", "etag", "md5Hash"), ("LastModified", "last_modified", "mtime", "created")
MOST_BYTES_OF_STUB, MOST_BLOCK_BYTES = 1 << 28, 1 << 30
Count = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]  # a number in a file, which may say anything


def block_sums(path: Path, size: int) -> tuple[str, str]:
    """Return a file's SHA-256, and the first DIGITS of that of each block of `size` bytes, in a row."""
    whole, each = hashlib.sha256(), []
    with open(path, "rb", buffering=0) as file:
        while block := _read_fully(file, size):
            whole.update(block)
            each.append(digest_of(block))
    return whole.hexdigest(), "".join(each)


def digest_of(block: bytes) -> str:
    """Return the first DIGITS of a block's SHA-256."""
    return hashlib.sha256(block).hexdigest()[:DIGITS]


def _read_fully(file: Any, size: int) -> bytes:
    content = file.read(size)
    while len(content) < size and (more := file.read(size - len(content))):
        content += more
    return bytes(content)


@dataclass(frozen=True)
class Stub:
    """What stands for a file in object storage.

    state: of the object (`state_of`). root: the folder of all local copies, relative to the stub's. sums: as
    `block_sums`; empty: a block is checked by its length, and by the object's state after it was fetched, and
    its checksum is kept behind it.
    """

    url: str
    size: Count
    state: str
    root: Annotated[str, Field(pattern=r"^\.\.(/\.\.)*$")]
    block_bytes: Annotated[int, Field(ge=1, le=MOST_BLOCK_BYTES)] = BLOCK_BYTES
    sums: str = ""

    @property
    def num_blocks(self) -> int:
        """Return into how many blocks the file is divided."""
        return -(-self.size // self.block_bytes)

    def sum_of(self, number: int) -> str:
        """Return the checksum of a block; empty if it is not known."""
        return self.sums[number * DIGITS : (number + 1) * DIGITS]

    def save(self, path: Path) -> None:
        """Write what stands for the file `path`."""
        replace_file(_beside(path, REMOTE), json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> "Stub | None":
        """Return what stands for the file `path`; None if nothing does.

        Raises:
            UserError: if it is damaged.
        """
        place = _beside(path, REMOTE)
        try:
            stub = TypeAdapter(cls).validate_json(read_plain(place, MOST_BYTES_OF_STUB), strict=True)
            if stub.sums and len(stub.sums) != DIGITS * stub.num_blocks:
                raise ValueError(f"sums: {len(stub.sums)} digits, expected {DIGITS * stub.num_blocks}")
            return stub
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(
                f"data: {place} is damaged ({printable(reason(error))}); delete its folder, and start again"
            ) from None


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def state_of(info: dict[str, Any]) -> str:
    """Return a short text that changes with an object's content, as far as the store tells.

    info: what fsspec says of it.
    """
    tag = next((info[key] for key in TAGS if info.get(key)), None)
    known = {"tag": tag} if tag else {key: info[key] for key in TIMES if info.get(key)}
    return hashlib.sha256(repr((info["size"], known)).encode()).hexdigest()[:DIGITS]


class StoredBytes:
    """Reads a file in object storage. A missing block is fetched; one process of the machine fetches all
    others ahead, as long as there is room for them.

    Args:
        path: the local copy's, for which a stub stands.

    Raises (when it reads):
        UserError: if a block cannot be fetched, or is another than its checksum says.
    """

    def __init__(self, path: Path, stub: Stub) -> None:
        self.name, self.size = stub.url, stub.size
        self._path, self._stub = path, stub
        self._prefix = f"{_beside(path, BLOCKS)}/"
        self._cache = BlockCache(path.parent / stub.root)
        self._system: tuple[int, Any, str] = (-1, None, "")  # of which process
        self._fills_in = -1  # the process that fetches ahead, or has
        self._checked: dict[int, int] = {}  # of each block that was compared: when it was written, in ns

    def read(self, at: int, size: int) -> bytes:
        """Return `size` bytes from byte `at` on."""
        if at < 0 or at + size > self.size:
            raise UserError(f"data: {self.name} has {self.size} bytes, byte {at + size} was asked for")
        parts = []
        while size > 0:
            number, inside = divmod(at, self._stub.block_bytes)
            count = min(size, self._length(number) - inside)
            parts.append(self._part(number, inside, count))
            at, size = at + count, size - count
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _length(self, number: int) -> int:
        return min(self._stub.block_bytes, self.size - number * self._stub.block_bytes)

    def _part(self, number: int, inside: int, count: int) -> bytes:
        found = self._kept(number, inside, count)
        if found is None:
            with self._locked(number):
                found = self._kept(number, inside, count)
                if found is None:
                    if self._fills_in != os.getpid():
                        self._fill()
                    block = self._fetch(number)
                    self._keep(number, block)
                    found = block[inside : inside + count]
        return found

    def _keep(self, number: int, block: bytes, *, evicts: bool = True) -> bool:
        trailer = b"" if self._stub.sums else digest_of(block).encode()
        return self._cache.add(Path(f"{self._prefix}{number:08}"), block + trailer, evicts=evicts)

    def _kept(self, number: int, inside: int, count: int) -> bytes | None:
        """Return bytes of a block on the disk; None if it is not there as a whole, or damaged.

        A count of 0 asks for its length alone.
        """
        path = f"{self._prefix}{number:08}"
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait
        except OSError:
            return None
        try:
            status = os.fstat(handle)
            trailer = 0 if self._stub.sums else DIGITS
            if stat.S_ISREG(status.st_mode) and status.st_size == self._length(number) + trailer:
                if max(status.st_atime, status.st_mtime) < time.time() - TOUCH_S:
                    touch(handle, status)
                if count == 0 or self._checked.get(number) == status.st_mtime_ns:
                    content = os.pread(handle, count, inside)
                else:
                    content = self._compared(number, handle)[inside : inside + count]
                    self._checked[number] = status.st_mtime_ns
                if len(content) == count:
                    return content
        except OSError:
            pass
        finally:
            os.close(handle)
        with suppress(OSError):
            os.unlink(path)
        return None

    def _compared(self, number: int, handle: int) -> bytes:
        """Return a block on the disk; OSError if it is not what its checksum says."""
        length = self._length(number)
        with open(handle, "rb", buffering=0, closefd=False) as file:
            content = _read_fully(file, length + DIGITS)
        expected = self._stub.sum_of(number) or content[length:].decode("ascii", "replace")
        if digest_of(content[:length]) != expected:
            raise OSError("damaged")
        return content[:length]

    def _locked(self, number: int) -> AbstractContextManager[None]:
        """Let other processes and threads wait that need the same block. Without locks, all fetch it."""
        return locked_byte(_beside(self._path, LOCKS), number)

    def _fetch(self, number: int) -> bytes:
        """Return a block from the storage, checked."""
        first, length = number * self._stub.block_bytes, self._length(number)

        def get() -> tuple[bytes, str]:
            system, path = self._opened()
            content: bytes = system.cat_file(path, start=first, end=first + length)
            if len(content) != length:
                raise OSError(f"{len(content):,} of {length:,} bytes arrived")
            if self._stub.sums:
                return content, digest_of(content)
            return content, state_of(system.info(path))

        expected, found = self._stub.sum_of(number) or self._stub.state, ""
        for _ in range(2):  # it may have been damaged on the way
            with told(self.name, "data"):
                block, found = attempt(
                    get, WAITS_S, passes=(FileNotFoundError, ImportError), within_s=WITHIN_S
                )
            if found == expected:
                return block
        what = "SHA-256" if self._stub.sums else "state"
        raise UserError(
            f"data {without_credentials(self.name)!r} is damaged or was replaced: bytes {first} to "
            f"{first + length - 1} have {what} {found}, expected {expected}; upload the right file, and go "
            "on with --resume"
        )

    def _opened(self) -> tuple[Any, str]:
        """Return the file system, which a fork must not share."""
        if self._system[0] != os.getpid():
            self._system = (os.getpid(), *open_system(self._stub.url))
        return self._system[1:]

    def _fill(self) -> None:
        """Begin to fetch all blocks ahead, unless another process does."""
        try:
            handle = os.open(_beside(self._path, FILLING), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            return
        self._fills_in = os.getpid()
        threading.Thread(target=self._fetch_all, args=(handle,), name="data ahead", daemon=True).start()

    def _fetch_all(self, lock: int) -> None:
        ahead = iter(range(self._stub.num_blocks))  # the threads take turns

        def fetch() -> None:
            # A failure is told by the read that needs the block.
            with suppress(UserError, OSError):
                for number in ahead:
                    if not self._fetch_ahead(number):
                        break

        threads = [
            threading.Thread(target=fetch, name="data ahead", daemon=True) for _ in range(FILL_STREAMS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fcntl.flock(lock, fcntl.LOCK_UN)  # a forked process may have it open too
        os.close(lock)

    def _fetch_ahead(self, number: int) -> bool:
        """Fetch a block that is not there; return whether there is room for more."""
        if self._kept(number, 0, 0) is not None:
            return True
        with self._locked(number):
            if self._kept(number, 0, 0) is not None:
                return True
            return self._keep(number, self._fetch(number), evicts=False)
