"""Convert models between Hugging Face folders and checkpoints of ours.

python tools/convert_hf.py import models/Mixtral-8x7B-v0.1 runs/mixtral
python tools/convert_hf.py upcycle models/code models/law models/news runs/mixed
python tools/convert_hf.py export runs/mixtral_continued exported
python tools/convert_hf.py export runs/demo exported --class mixtral --dtype bf16

`import` writes a run's folder: a checkpoint, the tokenizer, and continue.yaml, a run that goes on from it.
`upcycle` makes one MoE model of several dense ones: their FFNs are its experts, all else is averaged.
`export` writes config.json, sharded safetensors, and the tokenizer. None needs transformers, a GPU, or
the whole model in memory.
"""

import argparse
import sys
from pathlib import Path

from megamoe.compat.startup import configure_libraries
from megamoe.errors import ExitCode, UserError


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for a mistake, 130 if interrupted."""
    options = _parsed(arguments)
    configure_libraries()
    try:
        options.work(options)
        return ExitCode.FINISHED
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted; nothing half written is left", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.MISTAKE


def _parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the arguments; overrides may also follow an option, where argparse's verbs take none."""
    parser = _parser()
    options, further = parser.parse_known_args(arguments)
    if further and ("overrides" not in options or any(each.startswith("-") for each in further)):
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    if further:
        options.overrides += further
    return options


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    verb = verbs.add_parser(
        "import", help="a Hugging Face folder to a checkpoint and a run that continues it"
    )
    verb.add_argument("source", type=Path, metavar="FOLDER", help="with config.json and safetensors files")
    verb.add_argument("run", type=Path, metavar="RUN", help="a run's folder that does not exist, runs/<name>")
    verb.add_argument(
        "--multi-token-prediction", action="store_true", help="keep its blocks (DeepSeek-V3, GLM-4.5)"
    )
    verb.set_defaults(work=_import)

    verb = verbs.add_parser("upcycle", help="several dense Hugging Face folders to one MoE model and its run")
    verb.add_argument("sources", type=Path, nargs="+", metavar="FOLDER", help="dense, of one architecture")
    verb.add_argument("run", type=Path, metavar="RUN", help="a run's folder that does not exist, runs/<name>")
    verb.add_argument("--top-k", type=int, default=2, help="experts of a token (default: 2)")
    verb.add_argument("--seed", type=int, default=0, help="of the routers' initial weights (default: 0)")
    verb.set_defaults(work=_upcycle)

    verb = verbs.add_parser("export", help="a checkpoint, saved at any layout, to a Hugging Face folder")
    verb.add_argument("path", type=Path, metavar="RUN", help="a run's folder, or a step_* folder")
    verb.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that does not exist")
    verb.add_argument(
        "--class", dest="model_class", metavar="TYPE", help="a model_type, or custom; default: what fits"
    )
    verb.add_argument("--like", type=Path, metavar="FOLDER", help="keep its tokenizer and remaining keys")
    verb.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of parameters (default: as saved)")
    verb.add_argument("--shard-size", type=float, default=5.0, metavar="GB", help="of a file (default: 5)")
    verb.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the saved YAML")
    verb.set_defaults(work=_export)
    return parser


def _import(options: argparse.Namespace) -> None:
    from megamoe.apps.hf.import_folder import import_folder

    import_folder(options.source, options.run, further=options.multi_token_prediction)


def _upcycle(options: argparse.Namespace) -> None:
    from megamoe.apps.hf.upcycle import upcycle

    upcycle(options.sources, options.run, k=options.top_k, seed=options.seed)


def _export(options: argparse.Namespace) -> None:
    from megamoe.apps.hf.export_run import export_run

    if not options.shard_size > 0:
        raise UserError(f"--shard-size: found {options.shard_size}, expected a number of GB above 0")
    export_run(
        options.path,
        options.folder,
        model_class=options.model_class,
        like=options.like,
        dtype=options.dtype,
        shard_bytes=int(options.shard_size * 1e9),
        overrides=options.overrides,
    )
