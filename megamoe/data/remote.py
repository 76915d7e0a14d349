"""Files behind URLs (s3://, gs://, az://, hf://, memory://), read through fsspec.

Credentials come from where the providers' own tools take them: the environment, ~/.aws and the like. A URL
that holds some is refused, and what a library says of an error is shown without what looks like a secret.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from megamoe.errors import UserError
from megamoe.object_storage import PACKAGES, has_credentials, is_refusal, reason_of, without_credentials
from megamoe.redaction import remember


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
        system, path = _opened(url)
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
        system, path = _opened(url)
        return int(system.info(path)["size"]), str(system.ukey(path))


class RemoteFile(io.RawIOBase):
    """A file behind a URL, for reading; every error of the library becomes an OSError in one line."""

    def __init__(self, url: str) -> None:
        self._url = url
        with told(url):
            system, path = _opened(url)
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


def _opened(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    remember(conf)
    return url_to_fs(url)


@contextmanager
def told(url: str, what: str = "input") -> Iterator[None]:
    """Turn what fsspec and its file systems raise into a UserError in one line, about `what` the URL is."""
    name, scheme = without_credentials(url), url.partition("://")[0].lower()
    try:
        yield
    except UserError:
        raise
    except ImportError:
        package = PACKAGES.get(scheme, "fsspec")
        raise UserError(f"{what} {name!r}: {scheme}:// needs the package {package}; pip install it") from None
    except FileNotFoundError:
        expected = "a file, a folder or a glob" if what == "input" else "a file of a prepared dataset"
        raise UserError(f"{what} {name!r} does not exist; expected {expected}") from None
    except Exception as error:
        if isinstance(error, ValueError) and "protocol not known" in str(error).lower():
            raise UserError(
                f"{what} {name!r}: unknown scheme {scheme}://; expected one that fsspec knows, such as s3://"
            ) from None
        if is_refusal(error):
            raise UserError(
                f"{what} {name!r}: credentials are missing or refused; set them as the store's own tools "
                "read them (environment or file)"
            ) from None
        raise UserError(f"{what} {name!r} cannot be reached: {reason_of(error)}") from None
