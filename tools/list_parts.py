"""List every part and every preset that a configuration can name, with options, defaults and sources.

The same as `megamoe parts`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("parts")
