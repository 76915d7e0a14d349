"""Pretrain a Mixture-of-Experts GPT.

python pretrain_gpt_moe.py --config examples/demo.yaml [section.key=value ...]
torchrun --nproc-per-node 2 pretrain_gpt_moe.py --config examples/demo.yaml parallel.expert=2
"""

import argparse
import os
import sys


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
        if not _another_rank_tells():
            print("error:", " ".join(str(error).splitlines()), file=sys.stderr)
        return 2
    return 0


def _another_rank_tells() -> bool:
    """True on all ranks but the first; a rank that is no number is a mistake to tell."""
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return rank.isdigit() and int(rank) > 0


if __name__ == "__main__":
    sys.exit(main())
