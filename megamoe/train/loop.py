"""The loop: step, evaluate, record, save, until the end or a reason to stop."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megamoe.config import RunConfig, to_dict
from megamoe.errors import ExitCode
from megamoe.metrics import ProgressLine, Recorder, print_summary, write_report
from megamoe.parallel import launch
from megamoe.parallel.consensus import CollectiveError, catch_error, raise_any_error
from megamoe.resilience.error_reporting import closing
from megamoe.resilience.heartbeat import tick
from megamoe.resilience.restarts import Launch
from megamoe.resilience.run_lock import locked
from megamoe.resilience.stopping import StopRule
from megamoe.resilience.watchdog import Watchdog
from megamoe.train.profile import ProfilerWindow
from megamoe.train.run_folder import prepare_run_folder
from megamoe.train.step import num_rollouts
from megamoe.train.summary import summary_record, summary_rows
from megamoe.train.trainer import Trainer


def train(config: RunConfig) -> ExitCode:
    """Train the run that `config` describes, to its end or until it is told to stop.

    Raises:
        UserError: for everything that a user can put right.
    """
    with closing() as cleanup:
        cleanup.callback(launch.stop)  # the ranks may have been started, however far the next line comes
        trainer = Trainer(config)
        cleanup.callback(trainer.close)
        return Loop(trainer).run()


class Loop:
    """One launch of a run."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.is_first = trainer.world.is_first
        self.stop_rule = StopRule(self.config.train)
        self.saved_step = trainer.progress.step
        self.save_is_due = False
        self.recorder: Recorder | None = None
        self.line: ProgressLine | None = None
        self.told_to_stop = False  # by a signal, to any rank

    def run(self) -> ExitCode:
        """From the present step to the end, or to a reason to stop."""
        hang_minutes = self.config.train.hang_minutes
        with closing() as cleanup:
            # When each rank knows whose the launch is, all have started, and none dies of a signal any more.
            this_launch = Launch.gathered(self.trainer.checkpoints.latest())
            self.stop_rule.listen()
            # The folder is there before any rank writes into it, and no rank goes on if it cannot be.
            raise_any_error(catch_error(lambda: self._open(cleanup, this_launch)) if self.is_first else None)
            with Watchdog(self.trainer.folder.path, self.trainer.world.rank, hang_minutes):
                self._run_steps()
        if self.is_first and self.config.log.report:
            print(f"report: {write_report(self.trainer.folder.path)}")
        if not self.told_to_stop:
            return ExitCode.FINISHED
        dist.barrier()  # a launcher ends the others as soon as one rank has ended with this code
        return ExitCode.STOPPED

    def _run_steps(self) -> None:
        trainer, folder = self.trainer, self.trainer.folder
        profiler = ProfilerWindow(self.config.train.profiler, folder.path / "profile", trainer.world.rank)
        trainer.callbacks.call("on_train_begin", trainer)
        if self.config.evaluation.at_start and trainer.progress.step == 0:
            self._record({"step": 0, "tokens": 0, **self._evaluate()})
        reason = None
        try:
            while trainer.progress.step < trainer.run.steps and reason is None:
                trainer.callbacks.call("on_step_begin", trainer)
                profiler.before_step(trainer.progress.step + 1)
                reason = self._one_step()
                self._say_trace(profiler.after_step(trainer.progress.step))
        except CollectiveError:
            self._finish_save()  # what was begun before stays good
            raise
        self._say_trace(profiler.finish())
        if reason is not None:
            self._say(f"stopping after step {trainer.progress.step}: {reason}; go on with --resume")
        if self.config.checkpoint.save_at_end or reason is not None:
            self._begin_save()
        self._finish_save()
        trainer.callbacks.call("on_train_end", trainer)

    def _open(self, cleanup: ExitStack, this_launch: Launch | None) -> None:
        trainer, folder, first_step = self.trainer, self.trainer.folder, self.trainer.progress.step
        cleanup.enter_context(locked(folder.path))
        record = summary_record(trainer.run)
        prepare_run_folder(folder, self.config, record, this_launch)
        print_summary(summary_rows(trainer.run, trainer.world, num_rollouts(trainer.model), first_step))
        resumed_step = first_step if folder.continues else None
        self.recorder = Recorder.open(
            folder.path, self.config.log, self.config.name, to_dict(self.config), resumed_step
        )
        cleanup.callback(self.recorder.close)
        self.line = cleanup.enter_context(ProgressLine(trainer.run.steps, self.config.log.every))

    def _one_step(self) -> str | None:
        """Step, evaluate and save when due, record; returns the reason to stop, if any."""
        trainer = self.trainer
        step_record, metrics = trainer.step()
        tick()
        if step_record.told:
            self._say(step_record.told)
        trainer.callbacks.call("on_step_end", trainer, metrics)
        self.stop_rule.step_done()
        step, last = trainer.progress.step, trainer.progress.step == trainer.run.steps
        reason = self._agreed_reason()
        evaluates = last or _is_due(step, self.config.evaluation.every)
        if evaluates:
            metrics.update(self._evaluate(at_end=last))
        if evaluates or reason is not None or _is_due(step, self.config.log.every):
            self._record(metrics)
        self.save_is_due |= _is_due(step, self.config.checkpoint.every)
        # Not while steps are broken: the weights may be why, and their copies would push out good ones.
        if self.save_is_due and not trainer.skip_policy.in_a_row:
            self._begin_save()
        self.told_to_stop = self.told_to_stop and not last
        return None if last else reason

    def _agreed_reason(self) -> str | None:
        """All ranks stop together, if any has a reason, a signal before a plan; and publish a save together,
        if all have written."""
        mine = self.stop_rule.reason()
        vote = 0.0 if mine is None else 2.0 if self.stop_rule.signalled else 1.0
        writes = not self.trainer.checkpoints.is_written
        # Made on the device: the host waits once, for the answer.
        values = (vote, float(writes))
        votes = torch.stack([torch.full((), value, device=self.trainer.world.device) for value in values])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        stops, writing = votes.tolist()
        if not writing:
            self._finish_save()
        if not stops:
            return None
        self.told_to_stop = stops == 2
        return mine or "another rank was told to stop"

    def _evaluate(self, at_end: bool = False) -> dict[str, float]:
        if not self.config.evaluation.batches:
            return {}
        losses = self.trainer.evaluate(at_end)
        self.trainer.callbacks.call("on_evaluate", self.trainer, losses)
        return losses

    def _begin_save(self) -> None:
        if self.trainer.progress.step == self.saved_step:
            return
        self._finish_save()
        self.trainer.begin_save()
        tick()
        self.saved_step = self.trainer.progress.step
        self.save_is_due = False
        if not self.config.checkpoint.background:
            self._finish_save()

    def _finish_save(self) -> None:
        """Wait for the save under way, if any."""
        if self.trainer.checkpoints.under_way:
            self._say(f"saved {self.trainer.finish_save()}")

    def _record(self, metrics: dict[str, Any]) -> None:
        if self.recorder is not None and self.line is not None:
            self.recorder.log(metrics)
            self.line.update(metrics)

    def _say_trace(self, path: Path | None) -> None:
        if path is not None:
            self._say(f"profile: {path}")

    def _say(self, message: str) -> None:
        if self.line is not None:
            self.line.say(message)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
