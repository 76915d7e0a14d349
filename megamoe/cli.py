"""`megamoe COMMAND ...`: training and every tool by one command, from a clone and from an installed package.

The module of a command is imported when it is called; tools/*.py of a clone call the same modules.
"""

import importlib
import sys
from pathlib import Path

from megamoe.resilience.error_reporting import exit_process, hide_secrets

# Command: the module whose `main(arguments)` returns the exit code, and what the command does.
COMMANDS = {
    "analyze": (
        "megamoe.apps.routing_analysis.command",
        "What the routers of trained models do: seven analyses of checkpoints, as JSON and figures",
    ),
    "checkpoint": ("megamoe.apps.checkpoints.command", "Inspect, verify, convert, average, prune them"),
    "convert": (
        "megamoe.apps.hf.command",
        "Convert models between Hugging Face folders and checkpoints of ours",
    ),
    "count": (
        "megamoe.apps.plan.count_command",
        "Count the parameters of models from their configurations, and compare them with published numbers",
    ),
    "evaluate": (
        "megamoe.apps.evaluation.command",
        "Perplexity of a checkpoint on data sets, and over sweeps of the router's options",
    ),
    "finetune": (
        "megamoe.apps.finetune.command",
        "Fine-tune a pretrained encoder to a task with several seeds, and evaluate it on all test sets",
    ),
    "generate": ("megamoe.apps.generation.command", "Generate text from a checkpoint"),
    "lab": (
        "megamoe.apps.lab.command",
        "Run a study: configurations over seeds, what is measured of them, and what the claims come to",
    ),
    "lm-eval": (
        "megamoe.apps.lm_eval.command",
        "lm-evaluation-harness on a checkpoint of ours, with any router, without conversion",
    ),
    "parts": (
        "megamoe.apps.reference.parts",
        "List every part and every preset that a configuration can name, with options, defaults and sources",
    ),
    "plan": (
        "megamoe.apps.plan.command",
        "Plan a run on a cluster without any GPU: memory, traffic between GPUs, and the time of a step",
    ),
    "preflight": (
        "megamoe.apps.cluster.preflight_command",
        "Check the nodes of a job before training: one process on each node, started by srun or torchrun",
    ),
    "prepare-chat": (
        "megamoe.apps.chat.prepare_command",
        "Turn conversations into the files that chat tuning reads",
    ),
    "prepare-data": ("megamoe.apps.prepare.command", "Turn text into the .bin/.idx files of pretraining"),
    "prepare-pairs": (
        "megamoe.apps.translation.prepare_command",
        "Turn parallel text into pairs for translation, a multilingual corpus and a classification task",
    ),
    "report": (
        "megamoe.apps.report.command",
        "Make the report of each run folder; with two or more, also a page that compares them",
    ),
    "show-batch": (
        "megamoe.apps.show_batch.command",
        "Show a batch of training: its tokens, which have a loss, documents and padding",
    ),
    "status": (
        "megamoe.apps.cluster.status_command",
        "Show on one screen how a run is, from the files in its folder alone",
    ),
    "translate": (
        "megamoe.apps.generation.translate_command",
        "Translate text, or the held-out pairs of a corpus, with a checkpoint; BLEU and chrF by sacreBLEU",
    ),
    "verify": ("megamoe.apps.verify.command", "Compare layouts of a run with one rank, tensor by tensor"),
    "train": ("megamoe.train.command", "Pretrain a Mixture-of-Experts language model"),
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
    code: int | None = importlib.import_module(COMMANDS[name][0]).main(arguments)
    return int(code or 0)


def run(name: str | None = None) -> None:
    """End the process with the exit code of a command; name: of tools/*.py, None: the first argument's."""
    hide_secrets()
    code = main() if name is None else call(name, sys.argv[1:])
    if code:
        exit_process(code)
    sys.exit(0)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items())
    return f"usage: megamoe COMMAND [ARGUMENTS]\n\n{rows}\n\nmegamoe COMMAND --help shows its arguments."


if __name__ == "__main__":
    run()
