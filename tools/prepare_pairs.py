"""Turn parallel text into pairs for translation and a multilingual corpus.

The same as `megamoe prepare-pairs`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("prepare-pairs")
