"""Make the report of each run folder; with two or more, also a page that compares them.

The same as `megamoe report`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("report")
