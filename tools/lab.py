"""Run a study: configurations over seeds, what is measured of them, and what the claims come to.

The same as `megamoe lab`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("lab")
