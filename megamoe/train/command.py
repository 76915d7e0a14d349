"""Pretrain a Mixture-of-Experts language model.

python pretrain_gpt_moe.py --config examples/demo.yaml [section.key=value ...]
torchrun --nproc-per-node 2 pretrain_gpt_moe.py --config examples/demo.yaml train.micro_batch_size=4

Without a clone, an installed package offers the same:

megamoe train --config run.yaml [section.key=value ...]
megamoe train --config run.yaml --check    # every problem of the configuration, without training
torchrun --nproc-per-node 2 -m megamoe --config run.yaml [section.key=value ...]
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megamoe.errors import LONGEST_LINE, ConfigError, ExitCode, UserError, printable
from megamoe.parallel.parent_death import end_with_launcher, is_launched
from megamoe.resilience.error_reporting import exit_process, hide_secrets, report_error

MOST_RANKS = 1 << 17  # that --check compares a layout with


def main(arguments: list[str] | None = None) -> int:
    """Read the configuration, train; return the exit code (megamoe.errors.ExitCode)."""
    end_with_launcher()
    parser = _parser()
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        from megamoe.config.messages import key_for

        ours = key_for(unknown[0].partition("=")[0])
        parser.error(f"unrecognized arguments: {' '.join(unknown)}" + f"; {ours}, without --" * bool(ours))
    overrides = options.overrides + (["checkpoint.resume=auto"] if options.resume else [])

    try:
        from megamoe.compat.startup import check_versions, configure_libraries, importing
        from megamoe.config import load_config

        check_versions()
        from megamoe.validation.early import early_problems, shorter_warmup

        overrides += (shorter := shorter_warmup(options.config, overrides))
        of_one_node = options.check or _has_one_node()
        problems, ends = early_problems(options.config, overrides) if of_one_node else ([], False)
        if problems and not options.check:
            return report_error(UserError(problems[0]))
        if _told(problems) and ends:
            return ExitCode.MISTAKE
        if shorter and (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0":
            print(f"note: {shorter[0]}, as the command line's train.steps is less", file=sys.stderr)
        configure_libraries()
        if options.check or options.ranks is not None:
            return _check(options, overrides, problems)
        from megamoe.parallel.rank_consistency import raise_on_all_ranks

        with raise_on_all_ranks({}), importing():
            config = load_config(options.config, overrides)
            from megamoe.train.loop import train

        return train(config)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return report_error(error)


def _check(options: argparse.Namespace, overrides: list[str], told: list[str]) -> int:
    """Print every problem of the run but those `told`, or one line that it is valid; return the exit code.

    Nothing is built and no rank is started. Without --ranks the number is the launcher's, or without a
    launcher the fewest that the layout needs.
    """
    from megamoe.compat.startup import importing

    with importing():
        from megamoe.config import load_config
        from megamoe.config.messages import differences_told
        from megamoe.parallel.launch import find_world
        from megamoe.parallel.layout import fewest_ranks
        from megamoe.train.resolved import examine
        from megamoe.train.run_folder import choose_run_folder
        from megamoe.train.saver import check_start

    if not options.check:
        raise UserError(f"--ranks: found {options.ranks}, which is for --check alone; leave it out")
    try:
        config = load_config(options.config, overrides)
    except ConfigError as error:
        return _told(error.args)
    world, size = find_world(), options.ranks
    if size is None:
        size = world.size if world.size > 1 else fewest_ranks(config.parallel)
    if not 0 < size <= MOST_RANKS:
        raise UserError(f"--ranks: found {size:,}, expected 1 to {MOST_RANKS:,}")
    problems, run = examine(config, size, replace(world, size=size))
    if run is None or problems or told:
        _told([problem for problem in problems if str(problem) not in told])
        return ExitCode.MISTAKE
    changes = check_start(
        run.config, run.vocabulary.size, choose_run_folder(replace(run.config, overwrite=True))
    )
    layout, plan = run.plan.layout, run.plan
    sizes = f"data {layout.data}, tensor {layout.tensor}, expert {layout.expert} x {layout.expert_tensor}"
    staged = {"pipeline": layout.pipeline, "context": layout.context}
    sizes = "".join(f"{name} {of}, " for name, of in staged.items() if of > 1) + sizes
    kind = f"ZeRO {plan.stage}, {plan.precision}, {run.steps:,} steps"
    print(f"valid: {options.config} on {size} rank{'s' * (size > 1)} ({sizes}), {kind}")
    for line in [*differences_told(config.differences), *changes]:
        print(line)
    return ExitCode.FINISHED


def _has_one_node() -> bool:
    """Whether no launcher started this process, or torchrun all of the ranks on this node."""
    variables = os.environ
    if is_launched():
        return variables.get("LOCAL_WORLD_SIZE") == variables.get("WORLD_SIZE", "")
    return "RANK" not in variables and "SLURM_PROCID" not in variables


def _told(problems: Sequence[object]) -> int:
    """Print problems, a line each; return the exit code: of a mistake if there is one."""
    for problem in problems:
        print(f"error: {printable(problem, LONGEST_LINE)}", file=sys.stderr, flush=True)
    return ExitCode.MISTAKE if problems else ExitCode.FINISHED


def run() -> None:
    """Call `main` and end the process with its exit code."""
    hide_secrets()
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
        "--check", action="store_true", help="print every problem of the configuration, and do not train"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="with --check: number of ranks (default: the fewest possible)"
    )
    # The deepspeed launcher adds it.
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the YAML")
    return parser
