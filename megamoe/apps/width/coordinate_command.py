"""Draw muP's coordinate check: how far the activations move in the first steps, over the width.

python tools/coordinate_check.py --config examples/demo.yaml --widths 64 128 256 512 --output check.png

The configuration is trained for some steps at each width with muP, the narrowest as its base, and without.
FFN sizes and the number of heads grow with the width. All steps train on the first batch, and after each the
change of that batch's activations since the start is measured. It is flat if it grows or shrinks by at most
the power 0.25 of the width over all widths but the narrowest, which moves more by terms that fall off with
the width. Without muP the picture shows what is amiss. Numbers go to a JSON file beside the picture.
"""

import argparse
import io
import json
import os
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path

from megamoe.apps.command import LAUNCHER, check_positive, check_writable, parser_of, run_tool, write_text
from megamoe.errors import UserError
from megamoe.io import replace_file

Sizes = dict[str, dict[int, list[tuple[float, float]]]]  # by place and width: (size, change) of each step


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of(__doc__)
    add, widths = parser.add_argument, [64, 128, 256, 512]
    add("--config", required=True, help="the run's YAML")
    add("--widths", nargs="+", type=int, default=widths, metavar="N", help=f"hidden sizes ({widths})")
    add("--seeds", nargs="+", type=int, default=[1], metavar="N", help="their means are shown (1)")
    add("--steps", type=int, default=4, metavar="N", help="of each run (4)")
    add("--output", required=True, type=Path, metavar="FILE", help="the picture, a PNG")
    add("overrides", nargs="*", metavar="section.key=value", help="overrides of the YAML")
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def _check(options: argparse.Namespace) -> None:
    check_positive("--steps", options.steps)
    check_writable("--output", options.output)
    if len(set(options.widths)) < 2 or min(options.widths) < 1:
        raise UserError(f"--widths: found {options.widths}, expected two or more different sizes")
    if left := [width for width in options.widths if width % min(options.widths)]:
        raise UserError(
            f"--widths: {left[0]} is no multiple of the narrowest, {min(options.widths)}, which is muP's base"
        )


def _run(options: argparse.Namespace) -> None:
    from megamoe.apps.width.coordinates import FLAT, MUP, STANDARD, exponents, means, measure, width_overrides
    from megamoe.config import load_config

    _check(options)
    for variable in LAUNCHER:  # a run has one rank
        os.environ.pop(variable, None)
    config, widths = load_config(options.config, options.overrides), sorted(set(options.widths))
    sizes = {
        (kind, width): width_overrides(config, width, widths[0], kind)
        for kind in (MUP, STANDARD)
        for width in widths
    }
    kinds: dict[str, Sizes] = {MUP: {}, STANDARD: {}}
    for (kind, width), overrides in sizes.items():
        found = []
        for seed in options.seeds:
            with redirect_stdout(io.StringIO()):
                found.append(measure(options.config, options.steps, seed, (*options.overrides, *overrides)))
            print(f"{kind}, width {width}, seed {seed}", flush=True)
        for place, steps in means(found).items():
            kinds[kind].setdefault(place, {})[width] = steps
    print(f"\n{'powers of the width':<26}{'size':>8}{'change':>8}{'wider':>8}")
    for kind, of_kind in kinds.items():
        for place, of_place in of_kind.items():
            size, change, wider = exponents(of_place)
            flat = "flat" if abs(wider) <= FLAT else "NOT flat"
            moves = flat if any(steps[-1][1] for steps in of_place.values()) else "does not move"
            print(f"{kind + ', ' + place:<26}{size:>+8.2f}{change:>+8.2f}{wider:>+8.2f}  {moves}")
    replace_file(options.output, _picture(kinds))
    write_text("--output", options.output.with_suffix(".json"), json.dumps(kinds, indent=1) + "\n")
    print(f"picture: {options.output}, numbers: {options.output.with_suffix('.json')}")


def _picture(kinds: Mapping[str, Sizes]) -> bytes:
    """Draw the change of the activations over the width: a row for each kind, a column for each place."""
    import matplotlib
    from matplotlib.figure import Figure

    from megamoe.apps.width.coordinates import exponents

    places = list(next(iter(kinds.values())))
    with matplotlib.rc_context({"axes.grid": True, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(2.7 * len(places), 2.5 * len(kinds)), dpi=130, layout="constrained")
        panels = figure.subplots(len(kinds), len(places), sharex=True, sharey="col", squeeze=False)
        for row, (kind, of_kind) in zip(panels, kinds.items(), strict=True):
            for axes, place in zip(row, places, strict=True):
                widths = sorted(of_kind[place])
                steps = len(of_kind[place][widths[0]])
                for step in range(1, steps):
                    changes = [of_kind[place][width][step][1] for width in widths]
                    colour = matplotlib.colormaps["viridis"](0.9 * step / steps)
                    axes.plot(widths, changes, marker=".", color=colour, label=f"step {step}")
                axes.set(xscale="log", yscale="log")
                axes.set_xticks(widths, map(str, widths))
                axes.minorticks_off()
                axes.set_title(f"{place}: width^{exponents(of_kind[place])[1]:+.2f}", fontsize=9)
            row[0].set_ylabel(f"{kind}\nRMS of the change")
        for axes in panels[-1]:
            axes.set_xlabel("hidden size")
        panels[0][-1].legend(fontsize=7, frameon=False)
        png = io.BytesIO()
        figure.savefig(png, format="png")
    return png.getvalue()
