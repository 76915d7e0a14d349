"""Compare a run under many layouts with one rank: losses, gradients, weights, moments, choices and metrics.

The same as `megamoe verify`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("verify")
