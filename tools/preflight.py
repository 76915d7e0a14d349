"""Check the nodes of a job before training: one process on each node, started by srun or torchrun.

The same as `megamoe preflight`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("preflight")
