"""What data and checkpoints in object storage share: packages by scheme, and texts without credentials.

Files are reached through fsspec. Credentials come from where the providers' own tools take them (the
environment, ~/.aws and the like), never from a URL, which configurations, cards and logs show.
"""

import re

from megamoe.redaction import HIDDEN, IN_URL, VALUES

SIGNATURE = re.compile(r"\?\S*")  # a signed URL carries its credential behind the question mark
PACKAGES = {
    **{"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"},
    **{"az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "hf": "huggingface_hub"},
}
LONGEST_REASON = 300  # characters


def has_credentials(url: str) -> bool:
    """Return whether a URL names a user or password, which no configuration may hold."""
    return IN_URL.search(url) is not None


def shown(url: str) -> str:
    """Return a URL as logs and cards may show it: without user, password and query."""
    return SIGNATURE.sub("", IN_URL.sub(f"{HIDDEN}@", url))


def reason_of(error: Exception, url: str = "") -> str:
    """Return what a library says, in one line of bounded length and without secrets.

    url: what was opened; it is shortened where the error repeats it.
    """
    said = str(error).replace(url, shown(url)) if url else str(error)
    text = " ".join(said.split()) or type(error).__name__
    text = SIGNATURE.sub("", VALUES.sub(HIDDEN, IN_URL.sub(f"{HIDDEN}@", text)))
    return text[:LONGEST_REASON]


def is_refusal(error: Exception) -> bool:
    """Return whether credentials are missing or refused, which no further attempt changes."""
    return isinstance(error, PermissionError) or "credential" in f"{type(error).__name__} {error}".lower()
