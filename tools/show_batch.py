"""Show a batch of training: its tokens, which have a loss, documents and padding.

The same as `megamoe show-batch`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("show-batch")
