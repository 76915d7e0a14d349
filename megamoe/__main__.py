"""`python -m megamoe` and `torchrun -m megamoe`: pretrain_gpt_moe.py for an installed package.

`python -m megamoe COMMAND` is `megamoe COMMAND`.
"""

import sys

from megamoe import cli
from megamoe.train import command

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in cli.COMMANDS:
        cli.run()
    command.run()
