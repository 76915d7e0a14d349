"""Pretrain a Mixture-of-Experts GPT.

python pretrain_gpt_moe.py --config examples/demo.yaml [section.key=value ...]
torchrun --nproc-per-node 2 pretrain_gpt_moe.py --config examples/demo.yaml parallel.expert=2
"""

import argparse
import errno
import os
import socket
import sys
import time

PATIENCE_S = 20  # for which the other ranks of a machine wait for the first one's word


def main() -> int:
    """Read the configuration, train; 2 for a mistake of the user's, told in one line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="the run's YAML")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run's latest checkpoint, if any"
    )
    parser.add_argument(
        "--local_rank", "--local-rank", help=argparse.SUPPRESS
    )  # the deepspeed launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the YAML")
    arguments = parser.parse_intermixed_args()
    overrides = arguments.overrides + (["checkpoint.resume=auto"] if arguments.resume else [])

    from megamoe.config import load_config
    from megamoe.errors import UserError
    from megamoe.vendors import settle_vendors

    settle_vendors()

    try:
        config = load_config(arguments.config, overrides)
        from megamoe.train.loop import train

        train(config)
    except UserError as error:
        return _tell(str(error))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        return _tell(f"{error.filename or 'output'}: {error.strerror}; the checkpoints saved so far stay")
    return 0


def _tell(message: str) -> int:
    """One line from each machine, which may have a mistake of its own (a missing file, say).

    The first rank of a machine tells it. The others wait meanwhile: a launcher ends all ranks as soon as one
    has ended. What is left of them then saw what the first did not.
    """
    local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if local_rank.isdigit() and int(local_rank) > 0:
        time.sleep(PATIENCE_S)
    place = "" if rank in ("0", local_rank) or not rank.isdigit() else f"{socket.gethostname()}: "
    print(f"error: {place}{' '.join(message.splitlines())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
