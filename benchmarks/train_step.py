"""Whole training steps: an MoE model, the dense one of equal active FLOPs, and transformers' Mixtral.

    python benchmarks/train_step.py [--config examples/demo.yaml] [--shape demo | large] [--rounds 15]
                                    [--ranks N | --memory | --startup] [--json FILE] [section.key=value ...]

All are trained in one process on mock data, a step of each in turn, so that a machine whose speed drifts
slows all. `dense`: its FFN is as large as the experts that one token meets. `transformers`: the same sizes,
sdpa, experts by grouped_mm, its balance loss; cross entropy, backward, clipping, fused AdamW, one process. In
bf16 its weights and moments are bf16, as such users have them; ours keeps fp32 masters. `flat AdamW`: of
PyTorch on one flat fp32 tensor of as many parameters, fused; its optimiser is clipping by the norm and the
update (in bf16 with a copy to bf16), ours the engine's step, where the gradients are cleared as well.

Printed are medians over the rounds, and medians of the rounds' ratios with their 90 % interval. Rounds with
hooks, after the others, show where the time of a step goes; of the backward pass of an MoE layer, the
experts' part alone stands apart.

--ranks N: the same over N ranks of this machine, which share the batch and its cores: parallel.expert=N for
`moe`, data parallelism for `dense`. Times are the first rank's. --memory: peak resident memory of a process
that trains one of them alone, libraries and all. --startup: seconds from the start of pretrain_gpt_moe.py to
the end of its first step, on mock data, without evaluation.

Bars are for one process at the two shapes, start-up's for the demo's; one holds where the interval reaches
it. Ends with 1 if one does not hold, with 2 for a mistake.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from megamoe.compat.startup import configure_libraries

configure_libraries()

from common.child import ROOT, is_first, is_rank_of, run_ranks, temporary_folder  # noqa: E402
from common.command import positive, user_errors_exit_2, write_json  # noqa: E402
from common.machine import settle_process, versions  # noqa: E402
from common.rounds import Ratio, median_interval  # noqa: E402
from layers.candidate import NotMeasured  # noqa: E402
from megamoe.apps.command import parser_of  # noqa: E402
from megamoe.errors import UserError  # noqa: E402
from steps import memory, startup  # noqa: E402
from steps.configs import Asked  # noqa: E402
from steps.measure import measure, steps_needed  # noqa: E402
from steps.report import Judged, as_data, judge, show  # noqa: E402
from steps.shapes import SHAPES, STARTUP_BAR, name_of  # noqa: E402

ROUNDS, STARTUP_ROUNDS = 15, 3


class Bench:
    """One call of the command: what it measures, and what came out.

    Raises:
        UserError: for what the user must put right, before anything is measured.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        if arguments.memory and arguments.rounds:
            raise UserError("--rounds: --memory takes a few steps in each process; leave one of them out")
        shape = SHAPES[arguments.shape].overrides() if arguments.shape else []
        self.asked = Asked(arguments.config, [*shape, *arguments.overrides], arguments.ranks)
        self.rounds = arguments.rounds or (STARTUP_ROUNDS if arguments.startup else ROUNDS)
        with tempfile.TemporaryDirectory() as output:
            self.moe = self.asked.moe_and_dense(1, output)["moe"]
        self.shape = name_of(self.moe)
        self.json = arguments.json
        self.data: dict[str, Any] = {"versions": versions(), "shape": self.shape, **vars(self.asked)}
        self.passes = True
        self.write()

    def steps(self) -> None:
        """Measure the steps of all candidates in turn."""
        with temporary_folder() as output:
            configs = self.asked.moe_and_dense(steps_needed(self.rounds), output)
            found = measure(configs, self.rounds, self.asked.ranks)
        judged = judge(found, self.shape if self.asked.ranks == 1 else None)
        self.passes = all(each.holds for each in judged)
        self.data["steps"] = as_data(found, judged)
        if is_first():
            print(f"{self.rounds} rounds, {found.tokens:,} tokens a step, {found.precision}")
            show(found, judged)
            self.write()

    def memory(self) -> None:
        """Measure the memory of a process for each candidate."""
        print("MB, resident; a process for each")
        print(f"{'':14}{'before':>12}{'peak':>12}")
        found: dict[str, Any] = {}
        for name in ("moe", "dense", "transformers"):
            try:
                found[name] = memory.peak_of(name, self.asked)
                resting, peak = (found[name][key] / 1e6 for key in ("resting", "peak"))
                print(f"{name:14}{resting:12,.1f}{peak:12,.1f}", flush=True)
            except NotMeasured as reason:
                found[name] = {"not measured": str(reason)}
                self.passes &= name == "transformers"
                print(f"{name:14} left out: {reason}", flush=True)
        self.data["memory"] = found
        self.write()

    def startup(self) -> None:
        """Measure the start of processes that train one step."""
        found = [startup.seconds(self.asked.config, self.asked.overrides) for _ in range(self.rounds)]
        for name in found[0]:
            print(f"{name:12}{statistics.median(each[name] for each in found):8.2f} s")
        totals = sorted(each["total"] for each in found)
        seconds = Ratio(statistics.median(totals), *median_interval(totals))
        bar = STARTUP_BAR if self.shape == "demo" else None
        judged = Judged("start-up, s", seconds, bar)
        print(judged.line())
        self.passes = judged.holds
        self.data["startup"] = {"seconds": found, **judged.as_data()}
        self.write()

    def write(self) -> None:
        """Write the file on the first rank."""
        if is_first():
            write_json(self.json, self.data)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _parser()
    arguments = parser.parse_intermixed_args(argv)
    with user_errors_exit_2(parser):
        bench = Bench(arguments)
        if arguments.ranks > 1 and not is_rank_of(arguments.ranks):
            return run_ranks(Path(__file__), argv, arguments.ranks)
        settle_process()
        if is_first():
            print(", ".join(f"{name} {value}" for name, value in bench.data["versions"].items()))
        run = bench.memory if arguments.memory else bench.startup if arguments.startup else bench.steps
        run()
    return 0 if bench.passes else 1


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    parser.add_argument("--config", default=str(ROOT / "examples/demo.yaml"))
    parser.add_argument("--rounds", type=positive)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--shape", choices=SHAPES, help="set the sizes; default: as the configuration says")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--ranks", type=positive, default=1)
    kind.add_argument("--memory", action="store_true")
    kind.add_argument("--startup", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
