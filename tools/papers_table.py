"""One table of fine-tuned and translating models, beside the baselines that they must beat.

The same as `megamoe papers-table`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("papers-table")
