"""The file systems of URLs (s3://, gs://, az://, hf://, memory://), by fsspec; their errors as one line.

Credentials come from where the providers' own tools take them: the environment, ~/.aws and the like. What a
library says of an error is shown without what looks like a secret.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megamoe.errors import UserError
from megamoe.object_storage import is_refusal, missing_package, reason_of, without_credentials
from megamoe.redaction import remember


def opened(url: str) -> tuple[Any, str]:
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
        raise UserError(f"{what} {name!r}: {scheme}:// {missing_package(scheme)}") from None
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
