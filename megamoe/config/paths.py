"""Checks of paths, run names and times in the configuration."""

import os
from pathlib import PurePath

# We append up to 15 bytes to the user's names; a file system allows 255 bytes for a name, Linux 4,096
# for a whole path.
LONGEST_PART, LONGEST_PATH = 240, 3800  # bytes
SHORTEST_MINUTES, LONGEST_MINUTES = 0.01, 10**7


def is_path(text: str) -> str:
    """Return the text if a file system can hold such a path.

    Raises:
        ValueError: what was expected, in words.
    """
    if not all(character.isprintable() for character in text):
        raise ValueError("expected a path without line breaks, NULs and other control characters")
    longest = max((len(os.fsencode(part)) for part in PurePath(text).parts), default=0)
    if longest > LONGEST_PART:
        raise ValueError(
            f"expected a path with parts of at most {LONGEST_PART} bytes, one has {longest}; shorten it"
        )
    if len(os.fsencode(text)) > LONGEST_PATH:
        raise ValueError(f"expected a path of at most {LONGEST_PATH:,} bytes; shorten it")
    return text


def is_dataset(text: str) -> str:
    """Return the path if a file ending can be appended to its last component."""
    if not PurePath(is_path(text)).name:
        raise ValueError("expected the path of a prepared dataset, without .bin or .idx")
    return text


def is_run_name(text: str) -> str:
    """Return the text if it can be a run's name, which is a folder inside `output`."""
    path = PurePath(is_path(text))
    if not path.name or path.is_absolute() or ".." in path.parts:
        raise ValueError("expected the name of a folder inside output, without '..'")
    return text


def is_minutes(minutes: float) -> float:
    """Return 0, which switches a function off, or a time that is long enough to measure."""
    if minutes and not SHORTEST_MINUTES <= minutes <= LONGEST_MINUTES:
        raise ValueError(f"expected 0, or a number from {SHORTEST_MINUTES} to {LONGEST_MINUTES}")
    return minutes
