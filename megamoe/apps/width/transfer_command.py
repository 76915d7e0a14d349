"""Sweep the learning rate at several widths, with muP and without, and say whether the best one transfers.

python tools/transfer.py --config examples/demo.yaml --widths 64 128 256 --rates 1e-3 3e-2 6 --steps 100 \\
    --output transfer.png

Each run is trained to its end, and its validation loss counts. The best rate of a width is the minimum of the
parabola through the best rate of the sweep and its neighbours, over log(lr). FFN sizes and the number of
heads grow with the width; muP's base is the narrowest. Numbers go to a JSON file beside the picture.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from megamoe.apps.command import parser_of, run_tool, write_text
from megamoe.apps.width.coordinate_command import add_options, check_options
from megamoe.errors import UserError
from megamoe.io import replace_file


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of(__doc__)
    add_options(parser, steps=100, widths=[64, 128, 256])
    parser.add_argument(
        "--rates",
        nargs=3,
        type=float,
        default=[1e-3, 3e-2, 6],
        metavar=("LOWEST", "HIGHEST", "COUNT"),
        help="learning rates, each the same number of times the one before (default: 1e-3 3e-2 6)",
    )
    parser.add_argument(
        "--factor", type=float, default=1.5, help="within which best rates count as the same (default: 1.5)"
    )
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def _rates(given: list[float]) -> list[float]:
    from megamoe.apps.width.transfer import geometric_rates

    lowest, highest, count = given
    if not 0 < lowest < highest or count != int(count) or not 3 <= count <= 100:
        raise UserError(
            f"--rates: found {lowest:g} {highest:g} {count:g}, expected a lowest and a higher one above 0, "
            "and 3 to 100 of them"
        )
    return geometric_rates(lowest, highest, int(count))


def _run(options: argparse.Namespace) -> None:
    from megamoe.apps.width.figures import transfer_figure
    from megamoe.apps.width.runs import MUP, STANDARD, WidthRun, run_all, width_overrides
    from megamoe.apps.width.transfer import best_rate, conclusion, final_loss, mean_losses
    from megamoe.config import load_config

    check_options(options)
    rates = _rates(options.rates)
    if options.factor < 1:
        raise UserError(f"--factor: found {options.factor:g}, expected at least 1")
    config, base = load_config(options.config, options.overrides), min(options.widths)
    runs = [
        WidthRun(
            options.config,
            kind,
            width,
            seed,
            options.steps,
            (*options.overrides, *width_overrides(config, width, base, kind)),
            lr,
        )
        for kind in (MUP, STANDARD)
        for width in sorted(set(options.widths))
        for seed in options.seeds
        for lr in rates
        if not (kind == STANDARD and width == base)  # the same runs as with muP
    ]
    done = run_all(
        final_loss,
        runs,
        options.workers,
        lambda run, loss: print(
            f"{run.kind}, width {run.width}, lr {run.lr:.3g}, seed {run.seed}: {loss:.4f}"
        ),
    )
    kinds = {kind: mean_losses(done, kind) for kind in (MUP, STANDARD)}
    kinds[STANDARD] = {base: kinds[MUP][base], **kinds[STANDARD]}
    best = {
        kind: {width: best_rate(losses) for width, losses in widths.items()} for kind, widths in kinds.items()
    }
    for kind in kinds:
        print(conclusion(kind, best[kind], options.factor))
    replace_file(options.output, transfer_figure(kinds, best))
    numbers: Path = options.output.with_suffix(".json")
    found = {
        kind: {
            str(width): {
                "losses": {f"{lr:.6g}": loss for lr, loss in losses.items()},
                **asdict(best[kind][width]),
            }
            for width, losses in widths.items()
        }
        for kind, widths in kinds.items()
    }
    write_text("--output", numbers, json.dumps(found, indent=1) + "\n")
    print(f"picture: {options.output}, numbers: {numbers}")
