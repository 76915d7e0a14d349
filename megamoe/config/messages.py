"""Turns pydantic's errors into one line: the key, what was expected and found, the nearest valid name."""

import dataclasses
import json
import re
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError

from megamoe.registry import nearest, unknown_name_message

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "dataclass_type": "a mapping",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "needs_python_object": "nothing: this type has no form in YAML",
    "literal_error": "{expected}",
}
_LONGEST = 80


def first_problem(error: ValidationError, schema: Any) -> str:
    """Return the first problem in `error`, for a tree checked against the dataclass `schema`."""
    problems = error.errors(include_url=False)
    # An unknown key often causes the other errors, such as a missing key: report it first.
    problem = next((p for p in problems if p["type"] == "unexpected_keyword_argument"), problems[0])
    steps = [str(step) for step in problem["loc"] if step not in ("<word>", "<list>")]
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        return _at(steps[:-1], unknown_name_message("key", steps[-1], _known_keys(schema, steps[:-1])))
    if kind == "part":
        return _at(steps, problem["msg"])
    if kind in ("missing", "missing_argument"):
        return _at(steps, "this key is required")
    found = shown(problem["input"])
    if kind == "value_error":
        return _at(steps, f"{' '.join(str(context['error']).split())} (found {found})")
    expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else problem["msg"]
    hint = nearest(problem["input"], re.findall(r"'([^']*)'", expected)) if kind == "literal_error" else ""
    if kind == "string_type" and isinstance(problem["input"], bool):
        hint = "; yes, no, on and off are true and false unless they stand in quotes"
    return _at(steps, f"expected {expected}, found {found}{hint}")


def shown(value: Any) -> str:
    """Return a value as YAML on one line, shortened."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _at(steps: list[str], message: str) -> str:
    if steps[:2] == ["moe", "groups"] and len(steps) > 2:
        steps = ["moe", f"groups[{steps[2]}]", *steps[3:]]
    return f"{'.'.join(steps)}: {message}" if steps else message


def _known_keys(schema: Any, steps: list[str]) -> list[str]:
    """Return the keys of the section at `steps`, from the schema's dataclasses."""
    node = schema
    for step in steps:
        hints = get_type_hints(node)
        if step in hints:  # otherwise an index of a list, or a name that the user chose
            node = _inner_dataclass(hints[step]) or node
    return [f.name for f in dataclasses.fields(node)]


def _inner_dataclass(hint: Any) -> Any:
    """Return the dataclass inside `Sources`, `dict[str, Sources]`, `X | None` and similar types."""
    if dataclasses.is_dataclass(hint):
        return hint
    return next(filter(None, map(_inner_dataclass, get_args(hint))), None)
