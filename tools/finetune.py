"""Fine-tune a pretrained encoder to a task with several seeds, and evaluate it on all test sets.

The same as `megamoe finetune`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("finetune")
