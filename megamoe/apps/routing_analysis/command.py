"""What the routers of trained models do: seven analyses of checkpoints, as JSON and figures.

python tools/analyze_routing.py runs/demo
python tools/analyze_routing.py runs/demo/checkpoints/step_00000150 runs/demo/checkpoints/step_00000300
python tools/analyze_routing.py runs/demo --analyses load,tokens --layers 2 --samples 16
torchrun --nproc-per-node 2 tools/analyze_routing.py runs/demo parallel.expert=2

The model runs over a validation set, the run's own by default, and some of its tokens are kept one by one
(--tokens). All checkpoints see the data of the first one. docs/models/evaluate.md explains each analysis.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megamoe.apps.command import check_positive, parser_of, run_tool
from megamoe.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    paths = "step_* folders or runs' folders, and overrides of the saved YAML"
    add("inputs", nargs="+", metavar="PATH | section.key=value", help=paths)
    known = "collapse, required, positive, load, tokens, map, fluctuation; default: those that suit"
    add("--analyses", default="", metavar="A,B,...", help=known)
    add("--data", metavar="NAME=PREFIX", help="prepared data, instead of the run's")
    add("--set", metavar="NAME", help="which validation set; default: the first")
    add("--samples", type=int, help="sequences; default: as many as in training")
    add("--tokens", type=int, default=4096, help="kept one by one; default: %(default)s")
    add("--layers", default="", metavar="N,M,...", help="default: all MoE layers")
    add("--threshold", type=float, action="append", help="of `required`; default: 0.9")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="default: as trained")
    add("--output", type=Path, help="default: the folder routing/ in the first one's run")
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parsed = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _analyze(parsed))


def _analyze(parsed: argparse.Namespace) -> None:
    from megamoe.apps.command import data_overrides
    from megamoe.apps.evaluation.trained_model import session
    from megamoe.apps.routing_analysis.figures import summary_lines, write_study
    from megamoe.apps.routing_analysis.study import Options, check_names, study

    paths = [Path(text) for text in parsed.inputs if _is_path(text)]
    overrides = [text for text in parsed.inputs if not _is_path(text)]
    if not paths:
        raise UserError("no checkpoint is named; expected a step_* folder, or runs/<name>")
    check_positive("--samples", parsed.samples)
    options = Options(
        analyses=tuple(name for name in parsed.analyses.split(",") if name),
        validation=parsed.set,
        samples=parsed.samples,
        tokens=parsed.tokens,
        layers=_layers(parsed.layers),
        thresholds=tuple(parsed.threshold or (0.9,)),
    )
    check_names(options, len(paths))
    overrides += data_overrides([parsed.data] if parsed.data else [])
    with session(overrides, parsed.precision) as ranks:
        is_first = ranks.world.is_first
        if is_first and parsed.output:
            with _made(parsed.output):  # what cannot be written must not cost a long evaluation first
                pass
        results = study(ranks, paths, options, report=ranks.world.say)
        if is_first:
            folder = parsed.output or _default_folder(Path(results["checkpoints"][0]["path"]))
            print("\n".join(summary_lines(results)))
            with _made(folder):
                print(f"{len(write_study(folder, results))} files in {folder}")


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder to write in; raise a UserError where that, or the block, fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        told = f"--output: {folder} cannot be written: {error.strerror}; name another folder"
        raise UserError(told) from None


def _is_path(text: str) -> bool:
    return "=" not in text or Path(text).exists()


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(",") if number)
    except ValueError:
        raise UserError(f"--layers: found {text!r}, expected numbers such as 2,4") from None


def _default_folder(checkpoint: Path) -> Path:
    parent = checkpoint.parent
    return (parent.parent if parent.name == "checkpoints" else parent) / "routing"
