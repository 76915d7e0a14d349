"""`megamoe COMMAND ...`: training and every tool by one command, from a clone and from an installed package.

The module of a command is imported when it is called; tools/*.py of a clone call the same modules.
"""

import ast
import importlib
import sys
from pathlib import Path

from megamoe.resilience.error_reporting import exit_process, hide_secrets

# The module of each command: `main(arguments)` returns the exit code, the docstring begins with what it does.
COMMANDS = {
    "analyze": "megamoe.apps.routing_analysis.command",
    "checkpoint": "megamoe.apps.checkpoints.command",
    "convert": "megamoe.apps.hf.command",
    "count": "megamoe.apps.plan.count_command",
    "evaluate": "megamoe.apps.evaluation.command",
    "finetune": "megamoe.apps.finetune.command",
    "generate": "megamoe.apps.generation.command",
    "lab": "megamoe.apps.lab.command",
    "lm-eval": "megamoe.apps.lm_eval.command",
    "parts": "megamoe.apps.reference.parts",
    "plan": "megamoe.apps.plan.command",
    "preflight": "megamoe.apps.cluster.preflight_command",
    "prepare-chat": "megamoe.apps.chat.prepare_command",
    "prepare-data": "megamoe.apps.prepare.command",
    "prepare-pairs": "megamoe.apps.translation.prepare_command",
    "report": "megamoe.apps.report.command",
    "show-batch": "megamoe.apps.show_batch.command",
    "status": "megamoe.apps.cluster.status_command",
    "translate": "megamoe.apps.generation.translate_command",
    "verify": "megamoe.apps.verify.command",
    "train": "megamoe.train.command",
}


def main(arguments: list[str] | None = None) -> int:
    """Call the command that the first argument names; return its exit code, 2 if there is none."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        return 0 if given else 2
    name, *rest = given
    if name not in COMMANDS:
        from megamoe.registry import nearest_and_all

        print(f"error: unknown command {name!r}{nearest_and_all(name, list(COMMANDS))}", file=sys.stderr)
        return 2
    return call(name, rest)


def call(name: str, arguments: list[str]) -> int:
    """Call a command of `COMMANDS`; return its exit code."""
    if Path(sys.argv[0]).name in ("megamoe", "__main__.py"):
        sys.argv[0] = f"megamoe {name}"  # which argparse shows
    code: int | None = importlib.import_module(COMMANDS[name]).main(arguments)
    return int(code or 0)


def run(name: str | None = None) -> None:
    """End the process with the exit code of a command; name: of tools/*.py, None: the first argument's."""
    hide_secrets()
    code = main() if name is None else call(name, sys.argv[1:])
    if code:
        exit_process(code)
    sys.exit(0)


def summary_of(name: str) -> str:
    """Return what a command does, in a sentence; its module is read, and not imported."""
    file = Path(__file__).parents[1].joinpath(*COMMANDS[name].split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition(".\n")[0]


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {summary_of(name)}" for name in COMMANDS)
    return f"usage: megamoe COMMAND [ARGUMENTS]\n\n{rows}\n\nmegamoe COMMAND --help shows its arguments."


if __name__ == "__main__":
    run()
