"""Turn conversations into the files that chat tuning reads.

The same as `megamoe prepare-chat`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("prepare-chat")
