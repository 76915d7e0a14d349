"""Checks that run in a process of their own, which tells what each found."""

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def checks_of(names: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """A module's functions that are called check_..., by the rest of their names."""
    return {name.removeprefix("check_"): check for name, check in names.items() if name.startswith("check_")}


def verdicts_of(checks: Mapping[str, Callable[[], None]]) -> str:
    """Run those that the command line names -> JSON: each one's traceback, empty where it passed."""
    verdicts = {}
    for name in sys.argv[1:]:
        verdicts[name] = ""
        try:
            checks[name]()
        except Exception:
            verdicts[name] = traceback.format_exc()
    return json.dumps(verdicts)
