"""lm-evaluation-harness on a checkpoint of ours, with any router, without conversion.

The same as `megamoe lm-eval`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.remove(str(Path(__file__).resolve().parent))  # where this file would hide the harness

from megamoe.cli import run

if __name__ == "__main__":
    run("lm-eval")
