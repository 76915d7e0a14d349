"""Sweep the learning rate at several widths, with muP and without, and say whether the best one transfers.

The same as `megamoe transfer`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("transfer")
