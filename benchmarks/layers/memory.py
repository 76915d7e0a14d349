"""Memory that one forward and backward pass of a candidate takes, in a process of its own.

    python -m layers.memory ours 2048,512,1024,8,2 fp32        # with benchmarks/ on PYTHONPATH

prints, as JSON, the resident memory before the pass, with weights and inputs but without gradients, and the
peak during it.
"""

import ctypes
import json
import sys

from megamoe.compat.startup import configure_libraries

configure_libraries()

from common import resident  # noqa: E402
from common.child import run_module  # noqa: E402
from common.machine import settle_process  # noqa: E402
from layers.candidate import NotMeasured, Shape, Weights  # noqa: E402
from layers.catalogue import CANDIDATES  # noqa: E402
from layers.measure import build, inputs_of, run_once, upstream_of  # noqa: E402


def bytes_above_rest(name: str, shape: Shape, dtype: str) -> int:
    """Return the peak resident memory of one pass above the resting state, in bytes.

    Raises:
        NotMeasured: if the candidate's process ends with an error.
    """
    sizes = ",".join(str(size) for size in vars(shape).values())
    code, output, message = run_module("layers.memory", name, sizes, dtype)
    if code != 0:
        raise NotMeasured(message[:120])
    found = json.loads(output.splitlines()[-1])
    return found["peak"] - found["resting"]


def main() -> int:
    """Measure this process; 1 with a line where a candidate is not measured."""
    name, sizes, dtype = sys.argv[1:]
    settle_process()
    shape = Shape.parse(sizes)
    try:
        print(json.dumps(measure(name, shape, dtype)))
    except NotMeasured as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


def measure(name: str, shape: Shape, dtype: str) -> dict[str, int]:
    """Measure bytes `resting` and at the `peak`, after a small pass that loads what libraries load once."""
    run(name, Shape(2 * shape.experts, 64, 64, shape.experts, shape.choices), dtype)
    return run(name, shape, dtype)


def run(name: str, shape: Shape, dtype: str) -> dict[str, int]:
    """Run one pass of a layer made for it."""
    candidate = CANDIDATES[name]
    module = build(candidate, shape, dtype, Weights.draw(shape))
    rows, upstream = inputs_of(candidate.rows, shape, dtype, 0), upstream_of(candidate.rows, shape, dtype)
    ctypes.CDLL(None).malloc_trim(0)  # what building has freed is not at rest
    resident.forget_peak()
    resting = resident.now()
    run_once(module, rows, upstream)
    return {"resting": resting, "peak": resident.peak()}


if __name__ == "__main__":
    sys.exit(main())
