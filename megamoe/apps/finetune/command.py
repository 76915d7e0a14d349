"""Fine-tune a pretrained encoder to a task with several seeds, and evaluate it on all test sets.

python tools/finetune.py --task examples/tasks/labels.yaml --checkpoint runs/mlm_small_x_moe
python tools/finetune.py --task my_task.yaml --checkpoint runs/mlm task.learning_rate=1e-4 task.seeds=[1,2,3]
torchrun --nproc-per-node 2 tools/finetune.py --task my_task.yaml --checkpoint runs/mlm parallel.expert=2

The task file names the data, the columns, the metrics, the hyperparameters (docs/models/tune.md). Each seed
is a training run of its own; a repeated command goes on where the last one stopped. The table shows mean and
standard deviation over the seeds; results.json and the predictions of each seed are in the output folder.
"""

import argparse
from pathlib import Path

from megamoe.apps.command import parser_of, run_tool
from megamoe.parallel.parent_death import end_with_launcher

PREFIX = "task."  # of overrides that change the task


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--task", type=Path, required=True, help="the task's YAML")
    add("--checkpoint", type=Path, required=True, help="a step_* folder, or a run's")
    add("--output", type=Path, metavar="DIR", help="default: runs/<task>/<pretrained run>")
    add("--overwrite", action="store_true", help="replace the results in the output folder")
    bad_lines = "a line that is no example is an error (default), or is left out and counted"
    add("--bad-lines", choices=("error", "skip"), default="error", help=bad_lines)
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    of_runs = "overrides of the runs; task.KEY=VALUE: of the task"
    add("overrides", nargs="*", metavar="section.key=value", help=of_runs)
    options = parser.parse_intermixed_args(arguments)
    end_with_launcher()
    codes: list[int] = []
    return run_tool(lambda: codes.append(_run(options))) or codes[0]


def _run(options: argparse.Namespace) -> int:
    from megamoe.apps.finetune.task import load_task

    of_task = [each for each in options.overrides if each.startswith(PREFIX)]
    of_run = [each for each in options.overrides if not each.startswith(PREFIX)]
    task = load_task(options.task, of_task)
    from megamoe.apps.evaluation.trained_model import session
    from megamoe.apps.finetune.finetune import finetune

    layout = [each for each in of_run if each.startswith(("parallel.", "plugins="))]
    with session(layout) as ranks:
        places = options.checkpoint, options.output
        how = {"overwrite": options.overwrite, "bad_lines": options.bad_lines}
        return int(finetune(task, ranks, *places, of_run, **how))
