"""Draw muP's coordinate check: how far the activations move in the first steps, over the width.

The same as `megamoe coordinate-check`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("coordinate-check")
