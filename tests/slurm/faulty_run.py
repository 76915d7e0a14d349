"""A plugin that plants faults in a run on two nodes: a rank is killed, a rank hangs, a batch's loss is NaN.

The first two happen once: a file tells that they have. The batch belongs to the data, so the undisturbed run
has it too.
"""

import math
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megamoe.registry import register
from megamoe.train.callbacks import Callback

if TYPE_CHECKING:
    from megamoe.train.callbacks import TrainingRun

KILLED_AT, HANGS_AT, DRAINED_AT, NAN_AT = 57, 113, 150, 217
FAULTS = {KILLED_AT: signal.SIGKILL, HANGS_AT: signal.SIGSTOP}
TAKEN = "steps.txt"  # of the steps that rank 0 began: job and step


@register("callback", "faulty_run")
class FaultyRun(Callback):
    """Source: this test."""

    def on_step_begin(self, trainer: "TrainingRun") -> None:
        """Note the step; plant the faults on rank 1 alone, on the second node."""
        step, engine = trainer.progress.step + 1, trainer.engine
        forward = type(engine).forward

        def not_a_number(*args: Any, **inputs: Any) -> Any:
            return forward(engine, *args, **inputs) * math.nan

        if step == NAN_AT:
            engine.forward = not_a_number
        else:
            vars(engine).pop("forward", None)
        if "SLURM_JOB_ID" not in os.environ:
            return
        if trainer.world.is_first:
            with Path(TAKEN).open("a", encoding="utf-8") as file:
                file.write(f"{os.environ['SLURM_JOB_ID']} {step}\n")
        elif step in FAULTS and not (mark := Path(f"faults_{step}")).exists():
            mark.touch()
            os.kill(os.getpid(), FAULTS[step])
        while step == DRAINED_AT + 10 and not Path("drained").exists():
            time.sleep(0.1)  # the node is drained while the run goes on
