"""What the routers of trained models do: ten analyses of checkpoints, as JSON and figures.

The same as `megamoe analyze`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("analyze")
