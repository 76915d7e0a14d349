"""Make the W&B workspace of a project, and with --compare a report that sets runs beside each other.

The same as `megamoe wandb-dashboard`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("wandb-dashboard")
