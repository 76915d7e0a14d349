"""Perplexity of a checkpoint on data sets, and over sweeps of the router's options.

python tools/evaluate.py runs/demo
python tools/evaluate.py runs/demo --data books=data/books/books --data code=data/code/code --samples 512
python tools/evaluate.py runs/threshold --sweep moe.router.capacity.eval_factor=0.25,0.5,1,2 --json sweep.json
torchrun --nproc-per-node 2 tools/evaluate.py runs/demo parallel.expert=2

By default the run's own validation sets are evaluated on as many samples as in training, and the loss is the
one that training reports. A sweep evaluates the checkpoint with each value of a key of the configuration;
several sweeps give all combinations. Their configurations are checked before the first evaluation, and FILE
of --json is replaced after each. `of dense` is the experts' FLOPs over those of dense FFNs.
"""

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

from megamoe.apps.command import check_options, model_parser, run_tool, write_text
from megamoe.errors import UserError
from megamoe.metrics.formats import name_non_finite

ARCHITECTURES = ("decoder", "encoder", "encoder_decoder")
SELECTOR = "moe.router.selector"
# The selector's options that matter for given choices: they change the weights.
WEIGHT_OPTIONS = tuple(f"{SELECTOR}.{name}" for name in ("weights", "scale", "renormalise"))
COLUMNS = ("data", "loss", "perplexity", "experts/token", "dropped", "of dense", "tokens/s")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = model_parser(__doc__)
    add, values = parser.add_argument, "evaluate with each of these values"
    prepared = "prepared data, instead of the run's"
    add("--data", action="append", default=[], metavar="NAME=PREFIX", help=prepared)
    add("--samples", type=int, help="of each data set; default: as many as in training")
    add("--sweep", action="append", default=[], metavar="KEY=V1,V2,...", help=values)
    add("--json", type=Path, metavar="FILE", help="also write the results as JSON")
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    """Evaluate every data set at every point of the sweeps; the first rank shows and writes the results."""
    points = list(itertools.product(*map(_values, options.sweep)))
    check_options(options, "samples", "json")
    from megamoe.apps.command import data_overrides
    from megamoe.apps.evaluation.perplexity import perplexity_on, validation_sets
    from megamoe.apps.evaluation.trained_model import session

    rows: list[dict[str, Any]] = []
    overrides = [*options.overrides, *data_overrides(options.data)]
    with session(overrides, options.precision, replays=True) as ranks:
        for point in points:
            config = ranks.check(options.path, point, ARCHITECTURES)
            if config.moe.router.replay is not None:
                _refuse_without_effect(point)
        for point in points:
            trained = ranks.open(options.path, point, ARCHITECTURES)
            if ranks.world.is_first and not rows:
                print(f"{trained.path}, step {trained.step}, {trained.precision}")
            sets, samples = validation_sets(trained, options.samples)
            for name, dataset in sets.items():
                found = perplexity_on(trained, dataset, samples, name)
                row = {"data": name, "settings": list(point), "samples": samples, **found.as_data()}
                if ranks.world.is_first:
                    _show(row, list(found.further), first=not rows)
                    rows.append(row)
            if options.json is not None and rows:
                text = json.dumps(name_non_finite(rows), indent=1, allow_nan=False)
                write_text("--json", options.json, text + "\n")


def _values(sweep: str) -> list[str]:
    """The overrides of one sweep."""
    key, equals, values = sweep.partition("=")
    if not (key and equals and values):
        raise UserError(
            f"--sweep: found {sweep!r}, expected KEY=V1,V2,... such as moe.router.selector.k=2,3,4"
        )
    return [f"{key}={value}" for value in values.split(",")]


def _refuse_without_effect(point: tuple[str, ...]) -> None:
    """Refuse a sweep over the choices of a selector whose choices a record replaces."""
    for key in (setting.partition("=")[0] for setting in point):
        if f"{key}.".startswith(f"{SELECTOR}.") and key not in WEIGHT_OPTIONS:
            raise UserError(
                f"--sweep: {key} has no effect on the choices that moe.router.replay replays; leave out the "
                f"replay, or sweep an option that weights them: {', '.join(WEIGHT_OPTIONS)}"
            )


def _show(row: dict[str, Any], further: list[str], first: bool) -> None:
    """Print a row, and before the first one the columns; further: those of the objective."""
    if first:
        print("  ".join(f"{column:>13}" for column in (*COLUMNS, *further)))
    numbers = (
        f"{row['lm_loss']:.6f}",
        f"{row['perplexity']:.4f}",
        f"{row['experts_per_token']:.3f}",
        f"{100 * row['dropped']:.2f} %",
        f"{row['dense_share']:.3f}",
        f"{row['tokens_per_s']:,.0f}",
        *(f"{row[name]:.4f}" for name in further),
    )
    line = "  ".join(f"{text:>13}" for text in (row["data"], *numbers))
    print("  ".join([line, *row["settings"]]), flush=True)
