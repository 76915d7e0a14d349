"""Start a run on several machines with DeepSpeed's launcher, after a check of what it needs.

python tools/deepspeed_launch.py --hostfile FILE [options of deepspeed] pretrain_gpt_moe.py --config FILE

The command line is that of `deepspeed`. First it is checked that the hostfile exists and is well formed, that
ssh and pdsh are installed, and that every machine of the hostfile answers by ssh. `deepspeed` itself trains
on this machine alone if the hostfile is missing, tries the first machine only, and ends with a traceback.
Here a mistake is one line and exit code 2. Otherwise the exit code is the launcher's.
"""

import sys

from megamoe.compat.startup import configure_libraries
from megamoe.errors import ExitCode, UserError


def main(arguments: list[str] | None = None) -> int:
    """Check and start; return the exit code."""
    configure_libraries()
    from megamoe.apps.cluster.hostfile import launch_with_deepspeed

    try:
        launch_with_deepspeed(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.MISTAKE
    return ExitCode.FINISHED
