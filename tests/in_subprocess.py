"""Checks that run in a separate process, which reports the result of each."""

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def checks_of(names: Mapping[str, Any]) -> dict[str, Callable[[], None]]:
    """Return a module's functions named check_..., by the rest of their names."""
    return {name.removeprefix("check_"): check for name, check in names.items() if name.startswith("check_")}


def run_checks(checks: Mapping[str, Callable[[], None]]) -> str:
    """Run the checks that the command line names; return JSON with each one's traceback, empty if it
    passed.
    """
    verdicts = {}
    for name in sys.argv[1:]:
        verdicts[name] = ""
        try:
            checks[name]()
        except Exception:
            verdicts[name] = traceback.format_exc()
    return json.dumps(verdicts)
