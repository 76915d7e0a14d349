"""Turns pydantic's errors into lines: the key, what was expected and found, the nearest valid name."""

import dataclasses
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError

from megamoe.config.yaml_text import parse_yaml
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
NAMES_ELSEWHERE = Path(__file__).with_name("names_elsewhere.yaml")


UNKNOWN, MISSING = "unexpected_keyword_argument", ("missing", "missing_argument")


def problems_of(error: ValidationError, schema: Any) -> list[str]:
    """Return the problems in `error`, a line for each key, for a tree checked against the dataclass `schema`.

    Unknown keys come first. A missing key is left out where there is an unknown one, which may be meant.
    """
    found: dict[tuple[str, ...], str] = {}
    unknown_in: set[tuple[str, ...]] = set()
    for problem in sorted(error.errors(include_url=False), key=lambda it: it["type"] != UNKNOWN):
        steps = [str(step) for step in problem["loc"] if step not in ("<word>", "<list>")]
        if problem["type"] == UNKNOWN:
            unknown_in.add(tuple(steps[:-1]))
        elif problem["type"] in MISSING and tuple(steps[:-1]) in unknown_in:
            continue
        found.setdefault(tuple(steps), _line(problem, steps, schema))
    return list(found.values())


def _line(problem: Any, steps: list[str], schema: Any) -> str:
    kind, context = problem["type"], problem.get("ctx", {})
    in_list = any(map(str.isdigit, steps))  # whose keys no other framework has
    if kind == UNKNOWN and not in_list and (ours := key_for(steps[-1])):
        return _at(steps[:-1], f"unknown key {steps[-1]!r}; {ours}")
    if kind == UNKNOWN:
        return _at(steps[:-1], unknown_name_message("key", steps[-1], _known_keys(schema, steps[:-1])))
    if kind == "part":
        return _at(steps, problem["msg"])
    if kind in MISSING:
        return _at(steps, "this key is required")
    found = shown(problem["input"])
    if kind == "value_error":
        return _at(steps, f"{' '.join(str(context['error']).split())} (found {found})")
    expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else problem["msg"]
    hint = nearest(problem["input"], re.findall(r"'([^']*)'", expected)) if kind == "literal_error" else ""
    if kind == "string_type" and isinstance(problem["input"], bool):
        hint = "; yes, no, on and off are true and false unless they stand in quotes"
    return _at(steps, f"expected {expected}, found {found}{hint}")


def key_for(name: str) -> str | None:
    """Return which key of ours says what a key or option of another framework says; None for other names.

    name: such as `num_hidden_layers`, `top_k`, `--num-layers`; see names_elsewhere.yaml.
    """
    row = _names_elsewhere().get(name.lstrip("-").replace("-", "_").lower())
    if row is None:
        return None
    example, note = row.get("example"), row.get("note")
    return f"here it is {row['key']}" + f", as in {example}" * bool(example) + f"; {note}" * bool(note)


@cache
def _names_elsewhere() -> dict[str, dict[str, str]]:
    return parse_yaml(NAMES_ELSEWHERE.read_text(encoding="utf-8"))


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


def differences_told(differences: list[str]) -> list[str]:
    """Return the lines of a configuration's `differences`; none without any."""
    return ["differences from the published model:", *(f"  {each}" for each in differences)] * bool(
        differences
    )
