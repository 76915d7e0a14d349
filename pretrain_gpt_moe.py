"""Pretrain a Mixture-of-Experts GPT.

python pretrain_gpt_moe.py --config examples/demo.yaml [section.key=value ...]
torchrun --nproc-per-node 2 pretrain_gpt_moe.py --config examples/demo.yaml train.micro_batch_size=4
"""

import argparse
import sys

from megamoe.parallel.parent_death import end_with_launcher
from megamoe.resilience.error_reporting import leave, tell


def main() -> int:
    """Read the configuration, train; returns the exit code (megamoe.errors.ExitCode)."""
    end_with_launcher()
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

    try:
        from megamoe.config import load_config
        from megamoe.vendors import settle_vendors

        settle_vendors()
        from megamoe.parallel.rank_consistency import refusing_together

        with refusing_together({}):
            config = load_config(arguments.config, overrides)
            from megamoe.train.loop import train

        return train(config)
    except (Exception, KeyboardInterrupt) as error:
        return tell(error)


if __name__ == "__main__":
    if code := main():
        leave(code)
    sys.exit(0)
