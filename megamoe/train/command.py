"""Pretrain a Mixture-of-Experts language model.

python pretrain_gpt_moe.py --config examples/demo.yaml [section.key=value ...]
torchrun --nproc-per-node 2 pretrain_gpt_moe.py --config examples/demo.yaml train.micro_batch_size=4

Without a clone, an installed package offers the same:

megamoe train --config run.yaml [section.key=value ...]
torchrun --nproc-per-node 2 -m megamoe --config run.yaml [section.key=value ...]
"""

import argparse
import sys
from pathlib import Path

from megamoe.parallel.parent_death import end_with_launcher
from megamoe.resilience.error_reporting import exit_process, report_error


def main(arguments: list[str] | None = None) -> int:
    """Read the configuration, train; return the exit code (megamoe.errors.ExitCode)."""
    end_with_launcher()
    options = _parser().parse_intermixed_args(arguments)
    overrides = options.overrides + (["checkpoint.resume=auto"] if options.resume else [])

    try:
        from megamoe.compat.startup import check_versions, configure_libraries
        from megamoe.config import load_config

        check_versions()
        configure_libraries()
        from megamoe.parallel.rank_consistency import raise_on_all_ranks

        with raise_on_all_ranks({}):
            config = load_config(options.config, overrides)
            from megamoe.train.loop import train

        return train(config)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return report_error(error)


def run() -> None:
    """Call `main` and end the process with its exit code."""
    if code := main():
        exit_process(code)
    sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megamoe" if Path(sys.argv[0]).name == "__main__.py" else None,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, help="the run's YAML")
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run's latest checkpoint, if any"
    )
    parser.add_argument(
        "--local_rank", "--local-rank", help=argparse.SUPPRESS
    )  # the deepspeed launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the YAML")
    return parser
