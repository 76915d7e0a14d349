"""What text may be a path, the name of a run, or a time: the checks that a bound of a number cannot say."""

import os
from pathlib import PurePath

# Files that we name after what the user named have up to 15 bytes more; a file system allows 255, Linux 4,096
# for a whole path.
LONGEST_PART, LONGEST_PATH = 240, 3800  # bytes
SHORTEST_MINUTES, LONGEST_MINUTES = 0.01, 10**7


def is_path(text: str) -> str:
    """A path that a file system can hold.

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
    """A path whose last part a file's ending can follow."""
    if not PurePath(is_path(text)).name:
        raise ValueError("expected the path of a prepared dataset, without .bin or .idx")
    return text


def is_run_name(text: str) -> str:
    """The name of a run: of a folder inside `output`."""
    path = PurePath(is_path(text))
    if not path.name or path.is_absolute() or ".." in path.parts:
        raise ValueError("expected the name of a folder inside output, without '..'")
    return text


def is_minutes(minutes: float) -> float:
    """0, which switches something off, or a time that a clock can tell."""
    if minutes and not SHORTEST_MINUTES <= minutes <= LONGEST_MINUTES:
        raise ValueError(f"expected 0, or a number from {SHORTEST_MINUTES} to {LONGEST_MINUTES}")
    return minutes
