"""Inspect, verify, convert, average and prune checkpoints.

python tools/checkpoint.py inspect runs/demo
python tools/checkpoint.py verify runs/demo runs/other/checkpoints/step_00000300
python tools/checkpoint.py convert runs/demo/checkpoints/step_00000300 weights --consolidated
python tools/checkpoint.py average runs/demo runs/averaged --last 5
python tools/checkpoint.py prune runs/demo --keep 2 --dry-run
"""

import argparse
import json
from pathlib import Path

from megamoe.apps.checkpoints import describe
from megamoe.apps.checkpoints.average import average, chosen, take_mean
from megamoe.apps.checkpoints.prune import prune
from megamoe.apps.checkpoints.stream import DTYPES, consolidate
from megamoe.apps.command import add_verb, parser_of, run_plain
from megamoe.checkpoint.format.folder import find_checkpoints
from megamoe.errors import UserError

DAMAGED = 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 for damage found, else that of `run_plain`."""
    parser = parser_of(__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    add = add_verb(verbs, "inspect", "show a checkpoint, or all of a run", _inspect)
    add("path", type=Path, metavar="PATH", help="a step_* folder, or a run's")
    add("--json", action="store_true", help="as JSON")
    add("--config", action="store_true", help="only its configuration, as YAML for --config")
    add("--quick", action="store_true", help="do not read the tensors for their checksums")

    add = add_verb(verbs, "verify", "check that every byte is as it was saved; exit code 1 if not", _verify)
    add("paths", type=Path, nargs="+", metavar="PATH", help="step_* folders, or runs'")

    add = add_verb(verbs, "convert", "write the whole weights into one safetensors file", _convert)
    add("source", type=Path, metavar="SRC", help="a step_* folder")
    add("path", type=Path, metavar="DST", help="a folder that does not exist")
    add("--consolidated", action="store_true", help="DST/model.safetensors and model.json")
    add("--dtype", choices=DTYPES, help="dtype of the parameters (default: as saved)")

    add = add_verb(verbs, "average", "write the mean of the weights of several checkpoints", _average)
    add("paths", type=Path, nargs="+", metavar="PATH", help="a run's folder, or step_* folders; then DST")
    add("--last", type=int, metavar="N", help="of a run: the newest N (default: all)")
    add("--ema", action="store_true", help="the mean that optimizer.ema kept in one checkpoint")

    add = add_verb(verbs, "prune", "delete old checkpoints of a run", _prune)
    add("path", type=Path, metavar="RUN", help="a run's folder")
    add("--keep", type=int, required=True, metavar="N", help="how many of the newest stay")
    add("--dry-run", action="store_true", help="only say what would be deleted")
    add("--damaged", action="store_true", help="delete damaged ones too")
    options = parser.parse_args(arguments)
    return run_plain(lambda: options.work(options))


def _inspect(options: argparse.Namespace) -> int:
    paths, is_run = find_checkpoints(options.path)
    states = {path: describe.integrity_of(path, options.quick or options.config) for path in paths}
    states = {path: state for path, state in states.items() if state != describe.REMOVED or not is_run}
    path = describe.taken_by_resume(states) if is_run else paths[0]
    if path is None and options.config:
        raise UserError(f"{options.path}: no intact checkpoint; name a step_* folder")
    if path is not None and options.config:
        print(describe.config_as_yaml(path), end="")
        return 0
    rows = describe.table(states, path) if is_run else []
    facts = describe.describe(path, states[path]) if path is not None else None
    if options.json:
        print(json.dumps({"checkpoints": rows, "resume": facts} if is_run else facts, indent=1))
        return 0
    blocks = [describe.table_as_text(rows)] if is_run else []
    blocks.append("no intact checkpoint" if facts is None else describe.as_text(facts))
    print("\n\n".join(blocks))
    return 0


def _verify(options: argparse.Namespace) -> int:
    code = 0
    for path in [found for named in options.paths for found in find_checkpoints(named)[0]]:
        state = describe.integrity_of(path)
        print(f"{path}: {state}", flush=True)
        code = code if state in (describe.INTACT, describe.REMOVED) else DAMAGED
    return code


def _convert(options: argparse.Namespace) -> int:
    if not options.consolidated:
        raise UserError("convert: add --consolidated, the only form that convert writes")
    if find_checkpoints(options.source)[1]:
        raise UserError(f"{options.source}: a run's folder; name one of its checkpoints, a step_* folder")
    consolidate(options.source, options.path, options.dtype)
    return _written(options.path, f"{len(describe.file_sizes(options.path))} files")


def _average(options: argparse.Namespace) -> int:
    *sources, path = options.paths
    if not sources:
        raise UserError(
            f"average: found {path} alone, expected a run's folder or checkpoints, and a new folder"
        )
    if options.ema:
        return _take_mean(options, sources, path)
    paths = chosen(sources, options.last)
    average(paths, path)
    return _written(path, f"the average of {', '.join(each.name for each in paths)}")


def _take_mean(options: argparse.Namespace, sources: list[Path], path: Path) -> int:
    if options.last is not None:
        raise UserError("--ema: takes the mean of one checkpoint; leave out --last")
    found, is_run = find_checkpoints(sources[0])
    if len(sources) > 1 or is_run:
        raise UserError(f"--ema: found {sources[0]}, expected one step_* folder, and a new folder")
    take_mean(found[0], path)
    return _written(path, f"the exponential mean of the weights of {found[0].name}")


def _written(path: Path, what: str) -> int:
    print(f"{path}: {what}; {describe.size(sum(describe.file_sizes(path).values()))}")
    return 0


def _prune(options: argparse.Namespace) -> None:
    prune(options.path, options.keep, options.damaged, options.dry_run, print)
