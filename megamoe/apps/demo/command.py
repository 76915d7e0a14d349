"""Train the demo, a small MoE language model, on the sources of Python's standard library.

megamoe demo
megamoe demo name=top1 moe.router.selector.k=1
megamoe demo --data-only

The data is prepared in ./data/stdlib, once, and the run is written to ./runs/demo. Neither a clone nor a
network is needed; the configuration is examples/demo.yaml of a clone.
"""

import argparse
from pathlib import Path

from megamoe.apps.command import parser_of
from megamoe.cli import call

DATA = "data/stdlib/stdlib"
PREPARE = "--stdlib --tokenizer train --vocab-size 4096 --workers 2 --shuffle-files 1 --overwrite --output"
CONFIG = Path(__file__).with_name("demo.yaml")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    options = _parser().parse_intermixed_args(arguments)
    code = 0
    if not Path(f"{DATA}.card.json").exists():  # which preparing writes last
        code = call("prepare-data", [*PREPARE.split(), DATA])
    if code or options.data_only:
        return code
    return call("train", ["--config", str(CONFIG), "overwrite=true", *options.overrides])


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--data-only", action="store_true", help="prepare the data, and do not train")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the YAML")
    return parser
