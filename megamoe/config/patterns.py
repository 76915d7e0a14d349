"""Regular expressions of the configuration, searched in the names of parameters.

They use Rust's `regex` from pydantic: a search takes time linear in the name, so no pattern can stall a
start. There are no look-arounds and no backreferences.
"""

import re
from collections.abc import Callable

from pydantic_core import SchemaError, SchemaValidator, core_schema

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
