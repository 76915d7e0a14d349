"""Plan a run on a cluster without any GPU: memory, traffic between GPUs, and the time of a step.

The same as `megamoe plan`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("plan")
