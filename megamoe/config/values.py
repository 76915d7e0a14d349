"""Types of the configuration's values: bounded numbers, paths, run names, times, patterns of parameters."""

import os
import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Annotated

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import SchemaError, SchemaValidator, core_schema

# We append up to 15 bytes to the user's names; a file system allows 255 bytes for a name, Linux 4,096
# for a whole path.
LONGEST_PART, LONGEST_PATH = 240, 3800  # bytes
SHORTEST_MINUTES, LONGEST_MINUTES = 0.01, 10**7


def is_path(text: str) -> str:
    """Return the path, with the user's folder for `~`, if a file system can hold it.

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
    return os.path.expanduser(text)


def is_dataset(text: str) -> str:
    """Return the path if a file ending can be appended to its last component."""
    path = is_path(text)
    if not PurePath(path).name:
        raise ValueError("expected the path of a prepared dataset, without .bin or .idx")
    return path


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


LONGEST = 200  # characters


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether a name contains a match.

    Raises:
        ValueError: saying why the text is not a regular expression.
    """
    if not 0 < len(pattern) <= LONGEST:
        raise ValueError(f"expected a regular expression of 1 to {LONGEST} characters")
    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError as error:
        reason = re.search(r"^error: (.*)$|(Compiled regex exceeds size limit)", str(error), re.M)
        problem = (reason[1] or reason[2]) if reason else str(error)
        raise ValueError(f"expected a regular expression: {problem}") from None
    return validator.isinstance_python


def checked_pattern(pattern: str) -> str:
    """Return the text if it compiles.

    Raises:
        ValueError: as `compile_pattern`.
    """
    compile_pattern(pattern)
    return pattern


# Upper bounds are far above any real use: larger values are mistakes that would overflow or be lost.
PositiveInt = Annotated[int, Field(gt=0, le=10**9)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**9)]
PositiveFloat = Annotated[float, Field(gt=0, le=1e15)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=1e15)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Size = Annotated[int, Field(gt=0, le=10**6)]  # a vector's length or a number of things
SizeOrZero = Annotated[int, Field(ge=0, le=10**6)]
Layers = Annotated[int, Field(gt=0, le=2000)]
Length = Annotated[int, Field(gt=0, le=2**24)]  # tokens of a sequence
Small = Annotated[float, Field(ge=1e-30, le=1)]  # added to a divisor; fp32 would lose a smaller value
Deviation = Annotated[float, Field(gt=0, le=1000)]
Decay = Annotated[float, Field(ge=0, le=1000)]
Rate = Annotated[float, Field(gt=0, le=1000)]
Minutes = Annotated[float, Field(ge=0.01, le=10**7)]
_MINUTES_OR_ZERO = {"anyOf": [{"const": 0}, {"type": "number", "minimum": SHORTEST_MINUTES}]}
MinutesOrZero = Annotated[float, AfterValidator(is_minutes), WithJsonSchema(_MINUTES_OR_ZERO)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # NumPy's bound
PathText = Annotated[str, AfterValidator(is_path)]
