"""Inputs behind URLs: which files a URL names, and reading them. A URL with credentials is refused."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from megamoe.data.remote import opened, told
from megamoe.errors import UserError
from megamoe.object_storage import has_credentials, reason_of, without_credentials


def find(url: str) -> list[str]:
    """Return the files that a URL (of a file, a folder or a glob) names: URLs, sorted.

    Raises:
        UserError: if it names nothing, its scheme is unknown, or it cannot be reached.
    """
    if has_credentials(url):
        raise UserError(
            f"input {without_credentials(url)!r} holds credentials; give them by the environment or the "
            "provider's own file"
        )
    with told(url):
        system, path = opened(url)
        if "*" in path or "?" in path or "[" in path:
            found = system.glob(path)
        elif system.isfile(path):
            return [url]
        else:
            found = system.find(path)
        names = [name for name in sorted(found) if not _is_hidden(name, path) and system.isfile(name)]
        if not names:
            raise UserError(
                f"input {without_credentials(url)!r} holds no files; expected text, .jsonl or .parquet files"
            )
        return [system.unstrip_protocol(name) for name in names]


def _is_hidden(name: str, folder: str) -> bool:
    inside = name.removeprefix(folder).split("/")
    return any(part.startswith(".") for part in inside)


def state(url: str) -> tuple[int, str]:
    """Return a file's size in bytes, and a string that changes with its content as far as the store tells."""
    with told(url):
        system, path = opened(url)
        return int(system.info(path)["size"]), str(system.ukey(path))


class RemoteFile(io.RawIOBase):
    """A file behind a URL, for reading; every error of the library becomes an OSError in one line."""

    def __init__(self, url: str) -> None:
        self._url = url
        with told(url):
            system, path = opened(url)
            self._file: IO[bytes] = system.open(path, "rb")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with self._as_os_error():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with self._as_os_error():
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    @contextmanager
    def _as_os_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise OSError(reason_of(error)) from None
