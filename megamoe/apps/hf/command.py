"""Convert models between Hugging Face folders and checkpoints of ours.

python tools/convert_hf.py import models/Mixtral-8x7B-v0.1 runs/mixtral
python tools/convert_hf.py export runs/mixtral_continued exported
python tools/convert_hf.py export runs/demo exported --class mixtral --dtype bf16

`import` writes a run's folder: a checkpoint, the tokenizer, and continue.yaml, a run that goes on from it.
`export` writes config.json, sharded safetensors, and the tokenizer. Neither needs transformers, a GPU, or
the whole model in memory.
"""

import argparse
from pathlib import Path

from megamoe.apps.command import add_verb, parser_of, run_plain
from megamoe.compat.startup import configure_libraries
from megamoe.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit code, that of `run_plain`."""
    parser = parser_of(__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")

    add = add_verb(
        verbs, "import", "a Hugging Face folder to a checkpoint and a run that continues it", _import
    )
    add("source", type=Path, metavar="FOLDER", help="with config.json and safetensors files")
    add("run", type=Path, metavar="RUN", help="a run's folder that does not exist, runs/<name>")

    add = add_verb(verbs, "export", "a checkpoint, saved at any layout, to a Hugging Face folder", _export)
    add("path", type=Path, metavar="RUN", help="a run's folder, or a step_* folder")
    add("folder", type=Path, metavar="FOLDER", help="a folder that does not exist")
    add("--class", dest="model_class", metavar="TYPE", help="a model_type, or custom; default: what fits")
    add("--like", type=Path, metavar="FOLDER", help="keep its tokenizer and remaining keys")
    add("--dtype", choices=("fp32", "bf16", "fp16"), help="of parameters (default: as saved)")
    add("--shard-size", type=float, default=5.0, metavar="GB", help="of a file (default: 5)")
    add("overrides", nargs="*", metavar="section.key=value", help="overrides of the saved YAML")
    options, further = parser.parse_known_args(arguments)
    if further and ("overrides" not in options or any(each.startswith("-") for each in further)):
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    if further:  # overrides may also follow an option, where argparse's verbs take none
        options.overrides += further
    configure_libraries()
    return run_plain(lambda: options.work(options))


def _import(options: argparse.Namespace) -> None:
    from megamoe.apps.hf.import_folder import import_folder

    import_folder(options.source, options.run)


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
