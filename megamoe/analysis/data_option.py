"""The option `--data NAME=PREFIX` of the tools that evaluate a model."""

import json

from megamoe.errors import UserError


def data_overrides(given: list[str]) -> list[str]:
    """Return the overrides that make prepared data the validation sets, by name; none for no data.

    given: NAME=PREFIX each; data of one name are blended.

    Raises:
        UserError: if one has another form.
    """
    if not given:
        return []
    sets: dict[str, list[str]] = {}
    for each in given:
        name, equals, prefix = each.partition("=")
        if not (name and equals and prefix):
            raise UserError(f"--data: found {each!r}, expected NAME=PREFIX, such as books=data/books/books")
        sets.setdefault(name, []).append(prefix)
    first = next(iter(sets.values()))
    return [
        "data.mock=false",
        f"data.sources={json.dumps(first)}",
        f"data.validation={json.dumps(sets)}",
        "data.split=[1, 0, 0]",
    ]
