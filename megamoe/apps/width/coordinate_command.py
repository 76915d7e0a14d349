"""Draw muP's coordinate check: how far the activations move in the first steps, over the width.

python tools/coordinate_check.py --config examples/demo.yaml --widths 64 128 256 512 --output check.png

The configuration is trained for some steps at each width with muP, the narrowest as its base, and without.
FFN sizes and the number of heads grow with the width. All steps train on the first batch, and after each the
change of that batch's activations since the start is measured. It is flat if it grows or shrinks by at most
the power 0.25 of the width over all widths but the narrowest, which moves more by terms that fall off with
the width. Without muP the picture shows what is amiss. Numbers go to a JSON file beside the picture.
"""

import argparse
import json
import os
from pathlib import Path

from megamoe.apps.command import check_positive, check_writable, parser_of, run_tool, write_text
from megamoe.errors import UserError
from megamoe.io import replace_file


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of(__doc__)
    add, widths = parser.add_argument, [64, 128, 256, 512]
    add("--config", required=True, type=Path, help="the run's YAML")
    add(
        "--widths", nargs="+", type=int, default=widths, metavar="N", help=f"hidden sizes (default: {widths})"
    )
    add("--seeds", nargs="+", type=int, default=[1], metavar="N", help="their means are shown (default: 1)")
    add("--steps", type=int, default=4, metavar="N", help="of each run (default: 4)")
    add("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (default: of the CPUs)")
    add("--output", required=True, type=Path, metavar="FILE", help="the picture, a PNG")
    add("overrides", nargs="*", metavar="section.key=value", help="overrides of the YAML")
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def _check(options: argparse.Namespace) -> None:
    check_positive("--steps", options.steps)
    check_positive("--workers", options.workers)
    check_writable("--output", options.output)
    if len(set(options.widths)) < 2 or min(options.widths) < 1:
        raise UserError(f"--widths: found {options.widths}, expected two or more different sizes")
    if left := [width for width in options.widths if width % min(options.widths)]:
        raise UserError(
            f"--widths: {left[0]} is no multiple of the narrowest, {min(options.widths)}, which is muP's base"
        )


def _run(options: argparse.Namespace) -> None:
    from megamoe.apps.width.coordinates import FLAT, exponents, means, measure
    from megamoe.apps.width.figures import coordinate_figure
    from megamoe.apps.width.runs import MUP, STANDARD, WidthRun, run_all, width_overrides
    from megamoe.config import load_config

    _check(options)
    config, base = load_config(options.config, options.overrides), min(options.widths)
    runs = [
        WidthRun(
            options.config,
            kind,
            width,
            seed,
            options.steps,
            (*options.overrides, *width_overrides(config, width, base, kind)),
        )
        for kind in (MUP, STANDARD)
        for width in sorted(set(options.widths))
        for seed in options.seeds
    ]
    done = run_all(
        measure,
        runs,
        options.workers,
        lambda run, _: print(f"{run.kind}, width {run.width}, seed {run.seed}"),
    )
    kinds = {kind: means(done, kind) for kind in (MUP, STANDARD)}
    print(f"\n{'powers of the width':<26}{'size':>8}{'change':>8}{'wider':>8}")
    for kind, of_kind in kinds.items():
        for place, of_place in of_kind.items():
            size, change, wider = exponents(of_place)
            flat = "flat" if abs(wider) <= FLAT else "NOT flat"
            moves = flat if any(steps[-1][1] for steps in of_place.values()) else "does not move"
            print(f"{kind + ', ' + place:<26}{size:>+8.2f}{change:>+8.2f}{wider:>+8.2f}  {moves}")
    replace_file(options.output, coordinate_figure(kinds))
    write_text("--output", options.output.with_suffix(".json"), json.dumps(kinds, indent=1) + "\n")
    print(f"picture: {options.output}, numbers: {options.output.with_suffix('.json')}")
