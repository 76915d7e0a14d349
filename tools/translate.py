"""Translate text, or the held-out pairs of a corpus, with a checkpoint; BLEU and chrF by sacreBLEU.

The same as `megamoe translate`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("translate")
