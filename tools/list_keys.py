"""Write the pages of all keys, metrics and parts, and a JSON Schema of a run's YAML for editors.

The same as `megamoe keys`, whose `--help` shows the arguments.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.cli import run

if __name__ == "__main__":
    run("keys")
