"""The training loop: step, evaluate, record and save, until the end or a reason to stop."""

import time
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist

from megamoe.config import RunConfig, to_dict
from megamoe.errors import ExitCode
from megamoe.io import METRICS_FILE
from megamoe.metrics import ProgressLine, Recorder, names, print_summary
from megamoe.moe.timers import LocalComputeTimer
from megamoe.parallel import consensus, launch
from megamoe.registry import application
from megamoe.resilience.error_reporting import closing
from megamoe.resilience.heartbeat import tick
from megamoe.resilience.processes import Launch, locked
from megamoe.resilience.run_status import RunStatus, host_name
from megamoe.resilience.stopping import StopRule
from megamoe.resilience.stragglers import Stragglers
from megamoe.resilience.watchdog import Watchdog
from megamoe.train.callbacks import is_due
from megamoe.train.run_folder import prepare_run_folder
from megamoe.train.summary import summary_record, summary_rows
from megamoe.train.trainer import Trainer

MOST_REPORT_BYTES = 256 << 20  # of metrics.jsonl: half a minute's reading


def train(config: RunConfig, leaves: bool = True) -> ExitCode:
    """Train the run that `config` describes, to its end or until it is asked to stop.

    leaves: whether the ranks leave their process group at the end; otherwise another run may follow in it.

    Raises:
        UserError: for every mistake that a user can correct.
    """
    with closing() as cleanup:
        if leaves:
            cleanup.callback(launch.stop)  # the ranks may already be started when the next line fails
        started = time.monotonic()
        trainer = Trainer(config)
        cleanup.callback(trainer.release)
        return Loop(trainer, started).run()


class Loop:
    """One launch of a run. started: by `time.monotonic`, None: now."""

    def __init__(self, trainer: Trainer, started: float | None = None) -> None:
        self.trainer = trainer
        self.config = trainer.config
        self.is_first = trainer.world.is_first
        self.stop_rule = StopRule(self.config.train, started)
        self.save_is_due = False
        self.recorder: Recorder | None = None
        self.line: ProgressLine | None = None
        self.stragglers: Stragglers | None = None

    def run(self) -> ExitCode:
        """Train from the current step to the end, or until there is a reason to stop."""
        hang_minutes, folder = self.config.train.hang_minutes, self.trainer.folder.path
        with closing() as cleanup:
            # When each rank knows whose the launch is, all have started, and none dies of a signal any more.
            this_launch = Launch.gathered(self.trainer.saver.checkpoints.latest())
            self.stop_rule.listen()
            # The folder exists before any rank writes into it, and no rank continues if it cannot be made.
            consensus.raise_any_error(
                consensus.catch_error(lambda: self._open(cleanup, this_launch)) if self.is_first else None
            )
            rank, layout = self.trainer.world.rank, self.trainer.layout
            stage = layout.pipeline_rank(rank) if layout.pipeline > 1 else None
            with self._status() as status, Watchdog(folder, rank, hang_minutes, stage):
                status.reason = self._run_steps()
        if self.is_first and self.config.log.report:
            self._write_report()
        if not self.stop_rule.by_signal:
            return ExitCode.FINISHED
        dist.barrier()  # a launcher ends the other ranks as soon as one rank exits with this code
        return ExitCode.STOPPED

    def _write_report(self) -> None:
        """Write the report; after a signal only if that takes seconds: a scheduler ends the job soon."""
        folder = self.trainer.folder.path
        if self.stop_rule.by_signal and (folder / METRICS_FILE).stat().st_size > MOST_REPORT_BYTES:
            print(f"report: not written, the run has a long record; python tools/report.py {folder}")
        else:
            print(f"report: {application('report')(folder)}")

    def _status(self) -> RunStatus:
        world, progress = self.trainer.world, self.trainer.progress
        folder = self.trainer.folder.path
        return RunStatus(folder, world.rank, world.size, lambda: progress.step, self.trainer.run.steps)

    def _run_steps(self) -> str | None:
        """Take the steps and save; return why the launch stops before the last step, or None."""
        trainer, say = self.trainer, self.trainer.world.say
        compute_timer = trainer.context.compute_timer = LocalComputeTimer(trainer.world.device)
        hosts, log = consensus.gather_from_ranks(host_name()), self.config.log
        if self.is_first and log.straggler_factor is not None:
            ranks, path = trainer.layout.stage_ranks, trainer.folder.path
            self.stragglers = Stragglers(log.straggler_factor, log.every, hosts, path, ranks)
        trainer.callbacks.call("on_train_begin", trainer)
        if 0 < trainer.run.steps <= trainer.progress.step:
            say(f"the run is complete after step {trainer.progress.step:,}; a larger train.steps goes on")
        if self.config.evaluation.at_start and trainer.progress.step == 0:
            self._record({names.STEP: 0, names.TOKENS: 0, **self._evaluate()})
        reason = None
        try:
            while trainer.progress.step < trainer.run.steps and reason is None:
                trainer.callbacks.call("on_step_begin", trainer)  # which waits for the first rank's record
                compute_timer.begin()
                reason = self._one_step()
        except consensus.CollectiveError:
            trainer.saver.finish()  # a save that began earlier is valid
            raise
        if reason is not None:
            say(f"stopping after step {trainer.progress.step}: {reason}; go on with --resume")
        saves = self.config.checkpoint.save_at_end or reason is not None
        if saves and trainer.progress.step != trainer.saver.saved_step:
            if skipped := trainer.skip_policy.in_a_row:
                what = "the last step was" if skipped == 1 else f"the last {skipped} steps were"
                say(f"{what} skipped; the checkpoint holds the weights from before")
            trainer.begin_save()
        trainer.saver.finish()
        trainer.callbacks.call("on_train_end", trainer)
        trainer.saver.finish_uploads(lambda: self.stop_rule.signalled)
        return reason

    def _open(self, cleanup: ExitStack, this_launch: Launch | None) -> None:
        trainer, folder, first_step = self.trainer, self.trainer.folder, self.trainer.progress.step
        done = trainer.progress.samples
        cleanup.enter_context(locked(folder.path))
        folder.check_unchanged()
        trainer.saver.begin_uploads()
        record = summary_record(trainer.run)
        prepare_run_folder(folder, self.config, record, this_launch)
        rows = summary_rows(trainer.run, trainer.world, first_step, done)
        print_summary(rows)
        resumed_step = first_step if folder.continues else None
        self.recorder = Recorder.open(
            folder.path, self.config.log, self.config.name, self._wandb_config(), resumed_step
        )
        cleanup.callback(self.recorder.close)
        self.line = cleanup.enter_context(ProgressLine(trainer.run.steps, self.config.log.every))

    def _wandb_config(self) -> dict[str, Any]:
        """Return the configuration, and by what runs are grouped: layout and study (`seed` is in it)."""
        layout, stage = self.trainer.layout, self.trainer.run.plan.stage
        sizes = f"ranks {layout.ranks}, tensor {layout.tensor}, expert {layout.expert}"
        for name in ("pipeline", "context"):
            sizes += f", {name} {getattr(layout, name)}" if getattr(layout, name) > 1 else ""
        more = {
            "layout": f"{sizes}, expert tensor {layout.expert_tensor}, ZeRO {stage}",
            "study": self.config.log.wandb.group or self.config.name,
        }
        return to_dict(self.config) | more

    def _one_step(self) -> str | None:
        """Step, evaluate and save if due, and record; return the reason to stop, if any."""
        trainer = self.trainer
        step_record, metrics = trainer.step()
        tick()
        if step_record.message:
            trainer.world.say(step_record.message)
        if self.stragglers is not None:
            for line in self.stragglers.add(step_record.compute_seconds_R):
                trainer.world.say(line)
            metrics |= self.stragglers.metrics
        trainer.callbacks.call("on_step_end", trainer, metrics)
        self.stop_rule.step_done()
        step, last = trainer.progress.step, trainer.progress.step == trainer.run.steps
        reason = self._agree()
        # After a signal the launcher kills the ranks soon.
        due = is_due(step, self.config.evaluation.every) and not self.stop_rule.by_signal
        evaluates = last or due
        if evaluates:
            metrics.update(self._evaluate(at_end=last))
        skipped = step_record.problem is not None
        if evaluates or skipped or reason is not None or is_due(step, self.config.log.every):
            self._record(metrics)
        self.save_is_due |= is_due(step, self.config.checkpoint.every)
        # Not while steps are skipped: bad weights may be the cause, and would replace good checkpoints.
        if self.save_is_due and not trainer.skip_policy.in_a_row:
            self.save_is_due = False
            trainer.begin_save()
        self.stop_rule.by_signal &= not last
        return None if last else reason

    def _agree(self) -> str | None:
        """Return the reason to stop, the same on all ranks; publish a checkpoint that all have written.

        One small collective of each step serves both.
        """
        saver = self.trainer.saver
        votes = [self.stop_rule.vote(), float(not saver.checkpoints.is_written)]
        stops, writing = consensus.largest_of_ranks(votes)
        if not writing:
            saver.finish()
        return self.stop_rule.agree(stops)

    def _evaluate(self, at_end: bool = False) -> dict[str, float]:
        if not self.config.evaluation.batches:
            return {}
        losses = self.trainer.evaluate(at_end)
        self.trainer.callbacks.call("on_evaluate", self.trainer, losses)
        return losses

    def _record(self, metrics: dict[str, Any]) -> None:
        if self.recorder is not None and self.line is not None:
            self.recorder.log(metrics)
            self.line.update(metrics)
