"""What data and checkpoints in object storage share: file systems, attempts, texts without credentials.

Files are reached through fsspec. Credentials come from where the providers' own tools take them (the
environment, ~/.aws and the like), never from a URL, which configurations, cards and logs show.
"""

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from megamoe.errors import UserError
from megamoe.redaction import HIDDEN, IN_URL, PARAMETER, line_of, redact, remember

URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.\-]*://")
SIGNATURE = re.compile(r"\?\S*")  # a signed URL carries its credential behind the question mark
PACKAGES = {
    **{"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"},
    **{"az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "hf": "huggingface_hub"},
}
LONGEST_REASON = 300  # characters
WAITS_S = (1.0, 3.0, 9.0, 27.0)  # before each further attempt; never drawn from Python's random numbers
# By scheme: time limits where the package lets a connection hang for long, and folders made as needed.
# Further attempts of the package of s3 would draw from Python's random numbers, whose state checkpoints hold.
OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    "s3": {
        "config_kwargs": {"connect_timeout": 20, "read_timeout": 60, "retries": {"total_max_attempts": 1}}
    },
}
OPTIONS["s3a"] = OPTIONS["s3"]
Result = TypeVar("Result")


class RemoteError(Exception):
    """Object storage that does not answer, or refuses; the text is one line without secrets."""

    def __init__(self, line: str) -> None:
        super().__init__(redact(line))


def is_url(text: str) -> bool:
    """Return whether a text names something behind fsspec, and not a path."""
    return URL.match(text) is not None


def check_folder(key: str, url: str) -> None:
    """Check the form of a folder's URL, and that its package is installed; nothing is connected.

    key: of the configuration, the beginning of messages.

    Raises:
        UserError: naming what is wrong.
    """
    scheme, separator, path = url.partition("://")
    safe = without_credentials(url)
    if not separator or not path.strip("/"):
        raise UserError(f"{key}: found {safe!r}, expected a URL such as s3://bucket/folder")
    if has_credentials(url) or "?" in url:
        raise UserError(
            f"{key}: {safe} has credentials in it, and would write them into the run's configuration; "
            "give them to the environment instead (for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)"
        )
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError:
        raise UserError(f"{key}: {safe} {missing_package(scheme)}") from None
    except ValueError:
        raise UserError(
            f"{key}: {safe}: fsspec does not know {scheme}://; expected s3://, gs:// or az://"
        ) from None


def missing_package(scheme: str) -> str:
    """Return what a scheme needs that is not installed, and the command that installs it."""
    package = PACKAGES.get(scheme, "of fsspec for it")
    extra = {"s3fs": "'megamoe[s3]'", "gcsfs": "'megamoe[storage]'", "adlfs": "'megamoe[storage]'"}
    return f"needs the package {package}: pip install {extra.get(package, package)}"


def open_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, which remembers no listings, and the path in it.

    Raises:
        ImportError: if the scheme's package is not installed.
        ValueError: if fsspec does not know the scheme.
    """
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    remember(conf)
    options = OPTIONS.get(url.partition("://")[0].lower(), {})
    system, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
    return system, str(path)


def attempt(
    action: Callable[[], Result],
    waits_s: Sequence[float],
    *,
    passes: tuple[type[Exception], ...] = (),
    within_s: float = math.inf,
) -> Result:
    """Return what the action returns, in the first attempt that succeeds.

    waits_s: the pauses before further attempts. passes: errors that pass through at once. within_s: no
    attempt begins after this time.

    Raises:
        RemoteError: if the last attempt fails, or credentials are missing or refused.
    """
    begun = time.monotonic()
    for wait_s in (*waits_s, None):
        try:
            return action()
        except Exception as error:
            if isinstance(error, passes):
                raise
            if wait_s is None or is_refusal(error) or time.monotonic() + wait_s > begun + within_s:
                raise RemoteError(reason_of(error)) from error
            time.sleep(wait_s)
    raise AssertionError


def has_credentials(url: str) -> bool:
    """Return whether a URL names a user, a password or a signature, which no configuration may hold."""
    return is_url(url) and bool(IN_URL.search(url) or PARAMETER.search(url))


def without_credentials(url: str) -> str:
    """Return a URL as logs and cards may show it: without user, password and query."""
    return SIGNATURE.sub("", IN_URL.sub(f"{HIDDEN}@", url))


def reason_of(error: Exception) -> str:
    """Return what a library says, in one line of bounded length and without secrets."""
    return line_of(error)[:LONGEST_REASON]


def is_refusal(error: Exception) -> bool:
    """Return whether credentials are missing or refused, which no further attempt changes."""
    return isinstance(error, PermissionError) or "credential" in f"{type(error).__name__} {error}".lower()
