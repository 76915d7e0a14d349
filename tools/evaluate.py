"""Perplexity of a checkpoint on data sets, and over sweeps of the router's options.

The same as `megamoe evaluate`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("evaluate")
