"""Regular expressions of the configuration, searched in the names of parameters.

They are those of Rust's `regex`, which pydantic brings: any of them is searched in time linear in the name,
so that no pattern can stall a start. There are no look-arounds and no backreferences.
"""

import re
from collections.abc import Callable

from pydantic_core import SchemaError, SchemaValidator, core_schema

LONGEST = 200  # characters


def compile_pattern(pattern: str) -> Callable[[str], bool]:
    """Whether a name has a match anywhere.

    Raises:
        ValueError: saying why the text is no regular expression.
    """
    if not 0 < len(pattern) <= LONGEST:
        raise ValueError(f"expected a regular expression of 1 to {LONGEST} characters")
    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError as error:
        reason = re.search(r"^error: (.*)$|(Compiled regex exceeds size limit)", str(error), re.M)
        told = (reason[1] or reason[2]) if reason else str(error)
        raise ValueError(f"expected a regular expression: {told}") from None
    return validator.isinstance_python


def checked_pattern(pattern: str) -> str:
    """The same text.

    Raises:
        ValueError: as `compile_pattern`.
    """
    compile_pattern(pattern)
    return pattern
