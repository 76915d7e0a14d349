"""Compare a run's losses, gradients, weights, moments and metrics under many layouts with those of one rank.

    megamoe verify --config run.yaml [--config other.yaml ...] [--ranks 8] [section.key=value ...]

The model is made small: a block of each kind, few experts, narrow, mock tokens. Parts, losses, objective
and optimizer stay. It trains three steps on one rank in fp32. Then it trains in the run's own layout, with
sizes of at most two, and with each kind of parallelism, ZeRO stage and recomputation. Each of these runs
saves after the first step, resumes, and saves again. What is compared are the checkpoints, which hold whole
tensors under any layout, the experts of every token, and the metrics.

What rounding may do is measured: the run on one rank with weights changed in their last place. Where a
layout differs by more, the command searches for the smallest layout that still differs, and names the first
tensors.

Ends with 0 if all are equal, with 1 if one differs or none can be compared, with 2 for a mistake.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from megamoe.apps.command import parser_of, run_tool

MOST_TRIES = 12  # of smaller layouts
WITHOUT_DATA = ("data.mock=true", "data.sources=[]", "data.validation={}", "data.sampling_exponent=null")


def main(arguments: list[str] | None = None) -> int:
    """Compare; return the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--config", required=True, action="append", help="the run's YAML; may be repeated")
    parser.add_argument("--ranks", type=int, default=8, help="the most processes at a time (default: 8)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep runs and checkpoints here")
    parser.add_argument("--only", metavar="TEXT", default="", help="only layouts with this in their line")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the YAML")
    options = parser.parse_intermixed_args(arguments)
    differ: list[bool] = []
    code = run_tool(lambda: differ.append(_verify(options)))
    return code or int(any(differ))


def _verify(options: argparse.Namespace) -> bool:
    import torch

    from megamoe.apps.command import check_positive
    from megamoe.apps.verify.layouts import variants_of
    from megamoe.apps.verify.mock_data import mock_data
    from megamoe.apps.verify.ranks import RankPool
    from megamoe.apps.verify.session import Session
    from megamoe.apps.verify.small import shrunk
    from megamoe.config import load_config
    from megamoe.errors import UserError

    check_positive("--ranks", options.ranks)
    most_ranks = options.ranks if options.device == "cpu" else min(options.ranks, torch.cuda.device_count())
    if most_ranks == 0:
        raise UserError("--device: found cuda, but PyTorch sees no GPU here; expected cpu")
    pool = RankPool(options.device)
    differ = []
    with tempfile.TemporaryDirectory(prefix="megamoe_verify_") as scratch:
        runs = []
        for number, path in enumerate(options.config, 1):
            folder = (options.keep or Path(scratch)) / f"{number}_{Path(path).stem}"
            try:  # the data may be on another machine
                config = load_config(path, [*options.overrides, *WITHOUT_DATA])
                tree, lines = shrunk(config, mock_data(config, folder / "data"))
            except UserError:
                config = load_config(path, options.overrides)
                tree, lines = shrunk(config)
            every = variants_of(config, tree)
            variants = [each for each in every if options.only in str(each)]
            if not variants:
                names = "; ".join(map(str, every))
                raise UserError(f"--only: found {options.only!r}, expected a part of one of: {names}")
            runs.append((path, lines, Session(tree, folder, pool, MOST_TRIES), variants))
        for path, lines, session, variants in runs:
            print("\n".join([f"{path} is made smaller:", *(f"  {line}" for line in lines)]), flush=True)
            differ.append(session.compare_all(variants, most_ranks))
    return any(differ)


if __name__ == "__main__":
    sys.exit(main())
