"""Look at checkpoints, check them, convert them, delete old ones.

python tools/checkpoint.py inspect runs/demo
python tools/checkpoint.py verify runs/demo runs/other/checkpoints/step_00000300
python tools/checkpoint.py convert runs/demo/checkpoints/step_00000300 weights --consolidated
python tools/checkpoint.py convert runs/demo/checkpoints/step_00000300 on_8_ranks --ranks 8 --expert 8
python tools/checkpoint.py prune runs/demo --keep 2 --dry-run
"""

import argparse
import io
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megamoe.checkpoint.format.folder import find_checkpoints
from megamoe.checkpoint.tools import describe
from megamoe.checkpoint.tools.consolidate import DTYPES, consolidate
from megamoe.checkpoint.tools.prune import prune
from megamoe.checkpoint.tools.relayout import relayout
from megamoe.errors import UserError
from megamoe.parallel.layout import Layout

DAMAGED, MISTAKE, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141


def main(arguments: list[str] | None = None) -> int:
    """Do what is asked; 1 if `verify` finds damage, 2 for a user's mistake, 130 if interrupted."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the last flush must not fail again
        return CLOSED_PIPE
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print("interrupted; nothing half written is left", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    verb = verbs.add_parser("inspect", help="what a checkpoint, or a run's, are")
    verb.add_argument("path", type=Path, metavar="PATH", help="a step_* folder, or a run's")
    verb.add_argument("--json", action="store_true", help="as JSON")
    verb.add_argument("--config", action="store_true", help="only its configuration, as YAML for --config")
    verb.add_argument("--tensors", action="store_true", help="also every tensor")
    verb.add_argument("--quick", action="store_true", help="do not read the tensors for their checksums")
    verb.set_defaults(run=_inspect)

    verb = verbs.add_parser("verify", help="whether every byte is as it was saved; exit code 1 if not")
    verb.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="step_* folders, or runs'")
    verb.set_defaults(run=_verify)

    verb = verbs.add_parser("convert", help="one file of whole weights, or a checkpoint cut for other ranks")
    verb.add_argument("source", type=Path, metavar="SRC", help="a step_* folder")
    verb.add_argument("path", type=Path, metavar="DST", help="a folder that does not exist")
    one = verb.add_argument_group("one file")
    one.add_argument("--consolidated", action="store_true", help="DST/model.safetensors and model.json")
    one.add_argument("--dtype", choices=DTYPES, help="of its parameters (default: as saved)")
    one.add_argument("--optimizer", action="store_true", help="also Adam's state, optimizer.safetensors")
    other = verb.add_argument_group("another layout")
    other.add_argument("--ranks", type=int, metavar="R", help="for how many ranks")
    for option in ("tensor", "expert", "expert-tensor"):
        other.add_argument(f"--{option}", type=int, help=f"parallel.{option.replace('-', '_')} (default 1)")
    other.add_argument("--zero-stage", type=int, choices=range(4), help="(default: of the run that saved)")
    verb.set_defaults(run=_convert)

    verb = verbs.add_parser("prune", help="delete old checkpoints of a run")
    verb.add_argument("path", type=Path, metavar="RUN", help="a run's folder")
    verb.add_argument("--keep", type=int, required=True, metavar="N", help="how many of the newest stay")
    verb.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    verb.add_argument("--damaged", action="store_true", help="delete damaged ones too")
    verb.set_defaults(run=_prune)
    return parser


def _inspect(options: argparse.Namespace) -> int:
    paths, is_run = find_checkpoints(options.path)
    states = {path: describe.state_of(path, options.quick or options.config) for path in paths}
    path = describe.taken_by_resume(states) if is_run else paths[0]
    if path is None and (options.config or options.tensors):
        raise UserError(f"{options.path}: no intact checkpoint; name a step_* folder")
    if path is not None and options.config:
        print(describe.config_as_yaml(path), end="")
        return 0
    rows = describe.table(states, path) if is_run else []
    facts = describe.describe(path, states[path]) if path is not None else None
    if options.json:
        found = {"checkpoints": rows, "resume": facts} if is_run else {**(facts or {})}
        if path is not None and options.tensors:
            found["index"] = describe.tensors(path)
        print(json.dumps(found, indent=1))
        return 0
    blocks = [describe.table_as_text(rows)] if is_run else []
    blocks.append("no intact checkpoint" if facts is None else describe.as_text(facts))
    if path is not None and options.tensors:
        blocks.append(describe.tensors_as_text(path))
    print("\n\n".join(blocks))
    return 0


def _verify(options: argparse.Namespace) -> int:
    code = 0
    for path in [found for named in options.paths for found in find_checkpoints(named)[0]]:
        state = describe.state_of(path)
        print(f"{path}: {state}", flush=True)
        code = code if state == describe.INTACT else DAMAGED
    return code


def _convert(options: argparse.Namespace) -> int:
    if options.consolidated == (options.ranks is not None):
        raise UserError("convert: say either --consolidated or --ranks R")
    sizes = {name: getattr(options, name) for name in ("tensor", "expert", "expert_tensor")}
    misplaced = {**sizes, "zero_stage": options.zero_stage}
    if not options.consolidated:
        misplaced = {"dtype": options.dtype, "optimizer": options.optimizer or None}
    for name, value in misplaced.items():
        if value is not None:
            wanted = "--ranks" if options.consolidated else "--consolidated"
            raise UserError(f"--{name.replace('_', '-')}: is for {wanted} only")
    if find_checkpoints(options.source)[1]:
        raise UserError(f"{options.source}: a run's folder; name one of its checkpoints, a step_* folder")
    if options.consolidated:
        consolidate(options.source, options.path, options.dtype, options.optimizer)
    else:
        layout = Layout(options.ranks, *(1 if size is None else size for size in sizes.values()))
        relayout(options.source, options.path, layout, options.zero_stage)
    files = describe.file_sizes(options.path)
    print(f"{options.path}: {len(files)} files, {describe.size(sum(files.values()))}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    prune(options.path, options.keep, options.damaged, options.dry_run, print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
