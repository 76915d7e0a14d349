"""lm-evaluation-harness on a checkpoint of ours, with any router, without conversion.

python tools/lm_eval.py runs/demo --include examples/lm_eval --tasks python_choice,python_text,python_complete
torchrun --nproc-per-node 2 tools/lm_eval.py runs/demo --include my_tasks --tasks mine parallel.expert=2

--include names folders of task files (YAML); only their tasks are then known. Without it, the tasks of the
harness are; --online lets it download their data. Task files may run code of their folder (`!function`).
"""

import argparse
import json
import logging
import os
from pathlib import Path

from megamoe.apps.command import check_options, model_parser, run_tool, write_text
from megamoe.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = model_parser(__doc__)
    add = parser.add_argument
    add("--tasks", required=True, metavar="NAME,...", help="tasks, groups or tags")
    add("--include", action="append", default=[], type=Path, metavar="FOLDER", help="of task files")
    add("--online", action="store_true", help="let the harness download data sets")
    add("--num-fewshot", type=int, metavar="N", help="examples before a question")
    add("--limit", type=int, metavar="N", help="only the first N documents of each task")
    add("--batch-size", type=int, default=8, metavar="B", help="of sequences (default: 8)")
    add("--max-length", type=int, metavar="S", help="input tokens; default: data.sequence_length")
    add("--keep-capacity", action="store_true", help="let the routers' capacity drop pairs")
    add("--json", type=Path, metavar="FILE", help="write the results and every answer")
    options = parser.parse_intermixed_args(arguments)
    return run_tool(lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    check_options(options, "limit", "batch_size", "max_length", "json")
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise UserError(f"--num-fewshot: found {options.num_fewshot}, expected at least 0")
    # The libraries read these when they are imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    if not options.online:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    from megamoe.apps.lm_eval.tasks import loaded_tasks

    logging.getLogger().setLevel(logging.ERROR)
    names = [name for name in options.tasks.split(",") if name]
    manager = loaded_tasks(names, options.include)
    from lm_eval import simple_evaluate
    from lm_eval.utils import make_table

    from megamoe.apps.evaluation.trained_model import session
    from megamoe.apps.lm_eval.model import Megamoe

    with session(options.overrides, options.precision) as ranks:
        trained = ranks.open(options.path)
        say = ranks.world.say
        say(f"{trained.path}, step {trained.step}, {trained.precision}")
        model = Megamoe(trained, options.batch_size, options.max_length, options.keep_capacity)
        for note in model.notes:
            say(note)
        found = simple_evaluate(
            model=model,
            tasks=names,
            task_manager=manager,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            bootstrap_iters=1000,
        )
        if found is None:  # where LOCAL_RANK is not 0; the others have the same answers
            return
        say(make_table(found))
        if options.json is not None and ranks.world.is_first:
            write_text("--json", options.json, json.dumps(found, indent=1, default=str) + "\n")
