"""Start a run on several machines with DeepSpeed's launcher, after a check of what it needs.

The same as `megamoe deepspeed-launch`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("deepspeed-launch")
