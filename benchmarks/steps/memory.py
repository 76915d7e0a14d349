"""Resident memory of a candidate's steps, in a process of its own.

    python -m steps.memory moe examples/demo.yaml [section.key=value ...]    # with benchmarks/ on PYTHONPATH

prints, as JSON, the bytes before the first step, with libraries and weights, and the most in a few steps.
"""

import ctypes
import json
import sys
import tempfile

from megamoe.compat.startup import configure_libraries

configure_libraries()

from common import resident  # noqa: E402
from common.child import run_module  # noqa: E402
from common.machine import settle_process  # noqa: E402
from layers.candidate import NotMeasured  # noqa: E402
from megamoe.errors import ExitCode, UserError  # noqa: E402
from megamoe.parallel.launch import find_world  # noqa: E402
from steps.candidate import Candidate  # noqa: E402
from steps.configs import Asked  # noqa: E402
from steps.ours import Ours  # noqa: E402
from steps.transformers_model import TransformersModel  # noqa: E402

STEPS = 3  # the first makes AdamW's moments


def peak_of(name: str, asked: Asked) -> dict[str, int]:
    """Return bytes `resting` and at the `peak` of a process that trains `moe`, `dense` or `transformers`.

    Raises:
        NotMeasured: if the candidate's process ends with an error.
        UserError: if that is a mistake in the configuration.
    """
    code, output, message = run_module("steps.memory", name, asked.config, *asked.overrides)
    if code != 0:
        raise UserError(message) if code == ExitCode.MISTAKE else NotMeasured(message[:120])
    found: dict[str, int] = json.loads(output.splitlines()[-1])
    return found


def main() -> int:
    """Measure this process; 1 with a line where the candidate is not measured, 2 for a user's mistake."""
    name, config, *overrides = sys.argv[1:]
    settle_process()
    try:
        with tempfile.TemporaryDirectory() as output:
            print(json.dumps(measure(name, Asked(config, overrides), output)))
    except NotMeasured as reason:
        print(reason, file=sys.stderr)
        return 1
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        return ExitCode.MISTAKE
    return 0


def measure(name: str, asked: Asked, output: str) -> dict[str, int]:
    """Measure this process from where the candidate is built."""
    candidate = _built(name, asked, output)
    ctypes.CDLL(None).malloc_trim(0)  # what building has freed is not at rest
    resident.forget_peak()
    resting = resident.now()
    for number in range(STEPS):
        candidate.step(number)
    found = {"resting": resting, "peak": resident.peak()}
    candidate.close()
    return found


def _built(name: str, asked: Asked, output: str) -> Candidate:
    configs = asked.moe_and_dense(STEPS, output)
    if name == "transformers":
        return TransformersModel(configs["moe"], find_world().device)
    return Ours(configs[name])


if __name__ == "__main__":
    sys.exit(main())
