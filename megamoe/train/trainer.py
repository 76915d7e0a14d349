"""The composition root, in the order of the work: checks, ranks, data, model, engine."""

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megamoe.checkpoint.format.meta import Meta
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.checkpoint.manager import load
from megamoe.compat.glibc import keep_freed_memory
from megamoe.config import RunConfig, to_dict
from megamoe.config.layer_kinds import experts_by_layer
from megamoe.data.batches import Batch, BatchStream, warn
from megamoe.data.datasets import Datasets
from megamoe.errors import UserError
from megamoe.metrics import names
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.backends import widen_products
from megamoe.moe.part import StepContext
from megamoe.moe.timers import StageTimers
from megamoe.optim.schedule import learning_rate
from megamoe.parallel import consensus, launch, random_state
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import start_groups
from megamoe.parallel.rank_consistency import Facts, check_same, raise_on_all_ranks
from megamoe.parallel.zero.deepspeed_moe_layer import moe_layer_factory
from megamoe.parallel.zero.engine import Engine
from megamoe.registry import application, plugin_digests
from megamoe.resilience.skipped_steps import SkipPolicy, name_samples
from megamoe.train.callbacks import Callbacks
from megamoe.train.rank_facts import facts_of_files, facts_of_start
from megamoe.train.resolved import ResolvedRun, resolve_run
from megamoe.train.routing_metrics import RoutingHistory, routing_metrics
from megamoe.train.run_folder import RunFolder
from megamoe.train.saver import Saver
from megamoe.train.speed import ProfilerWindow, Speed, stage_metrics
from megamoe.train.start_model import start_model
from megamoe.train.step import evaluate, num_rollouts, train_step
from megamoe.train.step_record import StepRecord

FILLS = 4  # an evaluation reads so many micro batches for each pipeline stage at a time


@dataclass
class Progress:
    """The run's progress: the state that a checkpoint holds besides tensors.

    samples, micro_batches: taken so far, over all ranks. They are independent, because a resumed run may cut
    its batches differently. skipped_steps: the steps that were not applied.
    """

    step: int = 0
    samples: int = 0
    micro_batches: int = 0
    skipped_steps: int = 0

    @classmethod
    def of(cls, meta: Meta) -> "Progress":
        """Return the progress that a checkpoint holds."""
        return cls(meta["step"], meta["samples"], meta["micro_batches"], meta["skipped_steps"])


class Trainer:
    """A run that is ready to train; the loop calls `step`, `evaluate` and `save`.

    run: what follows from the configuration.

    Raises (when built):
        UserError: for every mistake that a user can correct, if possible before ranks are started.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        if config.parallel.tensor > 1:
            launch.order_device_queues()
        if config.train.deterministic:
            launch.fix_order_of_additions()
        self.world = launch.find_world()
        facts: Facts = {}
        with raise_on_all_ranks(facts, self.world):
            self.run: ResolvedRun = self._resolve(facts)
            profiled = config.train.profiler.start_step is not None
            own = [ProfilerWindow(config.train.profiler)] if profiled else []
            self.callbacks = Callbacks(config.train.callbacks, own)
            vocabulary = self.run.vocabulary
            on_save = partial(self.callbacks.call, "on_save", self)
            self.saver = Saver(config, vocabulary.size, self.world, on_save)
            data, deepspeed = self.run.config.data, self.run.plan.content
            facts.update(facts_of_files(config, data, vocabulary, deepspeed, self.saver.resume_from))
        check_same(self.world, facts, config.parallel.timeout_minutes)
        launch.start(self.world, config.parallel.timeout_minutes, select_device=False)
        groups = start_groups(self.layout, config.parallel.timeout_minutes)
        saved = self.saver.open()
        self.progress = Progress() if saved is None else Progress.of(saved.meta)
        if saved is not None:
            self.run = self.run.continued(self.progress.step, self.progress.samples)
        self.datasets: Datasets = self._build_datasets()
        # The loader processes are forked here, before this process has CUDA and the model's memory.
        self._stream = self._stream_of(self.datasets.train, self.progress.samples, config.data.workers)
        try:
            launch.use_device(self.world)
            self.context = StepContext(
                seed=config.seed,
                data_group=groups.data if self.layout.data > 1 else None,
                timers=StageTimers(self.world.device) if config.log.timers else None,
            )
            run, make_layer = self.run, moe_layer_factory(self.context, groups, self.layout)
            model = start_model(config, run, self.world, make_layer, saved, groups.context)
            self.engine = Engine(config, model, self.world, run.plan, run.filled, run.kernels)
            self._seed()
            self.skip_policy = SkipPolicy(config.train)
            self.routing_history = RoutingHistory(experts_by_layer(config), config.log.dead_window)
            self.speed = Speed.of(config, self.run, self.world, num_rollouts(model))
            if saved is not None:
                self._resume(saved)
            self.saver.checkpoints.plan(self.engine)
            self.engine.train(True)
            self.routing = self._open_routing(model)
        except BaseException:
            self._stream.close()
            raise

    @property
    def layout(self) -> Layout:
        """The layout of the ranks."""
        return self.run.plan.layout

    @property
    def folder(self) -> RunFolder:
        """The folder that the run writes to."""
        return self.saver.folder

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest one that this launch wrote or resumed from."""
        return self.saver.last

    @property
    def model(self) -> LanguageModel:
        """The model inside the engine."""
        return self.engine.model

    def _resolve(self, facts: Facts) -> ResolvedRun:
        """Refuse what cannot run, before ranks are started.

        facts: receives the values that must be the same on all ranks.
        """
        facts.update(facts_of_start(self.config, self.world))
        run = resolve_run(self.config, self.world.size, self.world)
        widen_products(run.plan.precision, self.world.device)
        if self.world.device.type == "cpu" and self.config.model.keep_freed_memory:
            keep_freed_memory()
        return run

    def take_batches(self) -> list[Batch]:
        """Return this rank's micro batches of the next step."""
        size = self.run.schedule.size_at(self.progress.samples)
        return self._take(self._stream, size // self.run.schedule.unit)

    def step(self, batches: list[Batch] | None = None) -> tuple[StepRecord, dict[str, Any]]:
        """Run one optimiser step, on the next micro batches or those given; return its record and metrics.

        Raises:
            UserError: on every rank, if a step is not applied and the run therefore ends.
        """
        started = time.perf_counter()
        size = self.run.schedule.size_at(self.progress.samples)
        batches = batches or self.take_batches()
        self.context.step = self.progress.step + 1
        lr = learning_rate(self.context.step, self.config.optimizer, self.run.steps)
        smoothing, before = self.config.train.label_smoothing, self.progress.micro_batches
        scale = self.engine.loss_scale
        reason_to_skip = self.skip_policy.reason_to_skip
        in_flight = self.config.train.in_flight
        with self.routing.of(self.context.step, "train"):
            self.routing.check_batches(batches)
            record = train_step(
                self.engine, self.context, batches, lr, smoothing, before, reason_to_skip, in_flight
            )
        self.skip_policy.update(record.problem, record.lm_loss)
        if record.problem is None:
            self._after_step(record)
            self.engine.average_weights()
            self.routing_history.update(record.layers)
        else:
            self._report_problem(record, size)
        self.progress.step += 1
        self.progress.skipped_steps += record.problem is not None
        self.progress.samples += size
        self.progress.micro_batches += record.micro_batches
        seconds = time.perf_counter() - started
        metrics = {
            names.STEP: self.progress.step,
            names.TOKENS: self.progress.samples * self.run.sample_tokens,
            names.TIME: time.time(),
            **record.metrics(),
            **routing_metrics(record.layers, record.micro_batches, self.routing_history, self.layout.expert),
            **self._skipping_metrics(scale),
            names.LR: lr,
            names.BATCH_SIZE: size,
            **self.speed.metrics(record, size, seconds),
            **stage_metrics(self.context.timers),
        }
        return record, metrics

    def _skipping_metrics(self, scale: float) -> dict[str, float]:
        """Return the fp16 loss scale of the step and the number of skipped steps, where they apply."""
        fp16 = self.engine.precision == "fp16"
        metrics: dict[str, float] = {names.LOSS_SCALE: scale} if fp16 else {}
        if fp16 or self.progress.skipped_steps:
            metrics[names.SKIPPED_STEPS] = self.progress.skipped_steps
        return metrics

    def evaluate(self, at_end: bool = False) -> dict[str, float]:
        """Return the loss of every validation set (at the end also of the test set), and the objective's
        further metrics, by their names in metrics.jsonl.
        """
        sets = {names.of_validation_set(name): d for name, d in self.datasets.validation.items()}
        if at_end and self.datasets.test is not None:
            sets["test"] = self.datasets.test
        found = {name: self._means_on(name, dataset) for name, dataset in sets.items()}
        return {f"{name}/{word}": mean for name, means in found.items() for word, mean in means.items()}

    def _means_on(self, name: str, dataset: Any) -> dict[str, float]:
        micro_batches = self.config.evaluation.batches * self.run.schedule.final // self.run.schedule.unit
        recorded = self.routing.of(self.progress.step, name)
        with recorded, self._stream_of(dataset, start_sample=0, workers=0) as stream:
            batches = self._take_known(stream, micro_batches)
            return evaluate(self.engine, self.context, batches, self.run.objective)

    def _take_known(self, stream: BatchStream, count: int) -> Iterator[Batch]:
        """Yield this rank's next micro batches; if choices are replayed, they must be in their record.

        To take some is a collective of all ranks, for which a pipeline stage would wait after each.
        """
        stages = self.layout.pipeline
        at_once = 1 if stages == 1 else FILLS * stages
        for first in range(0, count, at_once):
            batches = self._take(stream, min(at_once, count - first))
            self.routing.check_batches(batches)
            yield from batches

    def _take(self, stream: BatchStream, count: int) -> list[Batch]:
        """Return this rank's next micro batches; if any rank cannot read its own, all raise the same
        error.
        """
        batches: list[Batch] = []
        problem = None
        try:
            batches += itertools.islice(stream, count)
        except UserError as error:
            problem = str(error)
        with self.context.compute_timer.paused():
            consensus.raise_any_error_fast(problem)
        return batches

    def save(self) -> Path:
        """Write a checkpoint of the current step; return when it is complete."""
        self.begin_save()
        self.saver.finish()
        assert self.saver.last is not None
        return self.saver.last

    def begin_save(self) -> None:
        """Begin a checkpoint of the current step, see `Saver.begin`."""
        state = {
            **vars(self.progress),
            "tokens": self.progress.samples * self.run.sample_tokens,
            "vocabulary": self.run.vocabulary.size,
            "skip_policy": self.skip_policy.state(),
            "routing_history": self.routing_history.state(),
            "config": to_dict(self.config),
            **({"plugins": plugin_digests(self.config.plugins)} if self.config.plugins else {}),
        }
        self.saver.begin(self.engine, state)

    def close(self) -> None:
        """End the loader processes and leave the process group."""
        self.release()
        launch.stop()

    def release(self) -> None:
        """End the loader processes; another trainer may follow in the same process group."""
        self._stream.close()
        self.saver.close()

    def _after_step(self, record: StepRecord) -> None:
        """Update what the layers learn without gradient."""
        constraints = []
        for number, layer in self.model.moe_layers():
            with self.engine.gathered(layer.parameters_after_step()):
                layer.after_step(record.wanted_on_device[number])
            constraints += layer.constraints()
        self.engine.project(constraints)

    def _report_problem(self, record: StepRecord, size: int) -> None:
        """Set the record's message about a step that was not applied, or end the run.

        Collective if the lm loss is not finite.
        """
        assert record.problem is not None
        first = self.progress.samples
        message = f"step {self.context.step}: {record.problem.what}; samples {first} to {first + size - 1}"
        if not math.isfinite(record.lm_loss):
            found = consensus.gather_from_ranks(record.not_finite)
            last_stage = range(len(found) - self.layout.stage_ranks, len(found), self.layout.tensor)
            message += name_samples({rank: found[rank] for rank in last_stage})
        not_finite = (n for n, layer in record.layers.items() if not math.isfinite(layer.entropy))
        if (first_layer := next(not_finite, None)) is not None:
            message += f"; first MoE layer whose router's probabilities are not finite: {first_layer}"
        reason = self.skip_policy.reason_to_end(record.problem)
        if reason is None:
            record.message = f"{message}; skipped" if record.problem.counts else ""
            return
        self.saver.finish()  # of the steps before, which were applied
        last = self.last_checkpoint
        way_out = f"go on from the last good checkpoint, {last}" if last else "begin anew (nothing is saved)"
        warmup = "warmup_steps" if self.config.optimizer.warmup_share is None else "warmup_share"
        raise consensus.CollectiveError(
            f"{message}; {reason}; no weight was moved. Lower optimizer.lr or lengthen "
            f"optimizer.{warmup}, and {way_out}"
        )

    def _build_datasets(self) -> Datasets:
        schedule, done = self.run.schedule, self.progress
        to_come = max(0, self.run.steps - done.step)
        return self.run.objective.datasets(
            train_samples=schedule.total_samples(to_come, done.samples),
            validation_samples=self.config.evaluation.batches * schedule.final,
        )

    def _open_routing(self, model: LanguageModel) -> Any:
        """Return the record of the routers' choices, and the one that is replayed."""
        routing = application("routing_record")(self.run, self.world)
        train = self.config.train
        step, last = self.progress.step, self.run.steps
        if train.exit_after_steps is not None:
            last = min(last, step + train.exit_after_steps)
        may_replace = self.config.overwrite or self.folder.restarted
        consensus.raise_any_error(
            consensus.catch_error(lambda: routing.check(step, last, may_replace and step == 0))
        )
        routing.attach(model)
        return routing

    def _resume(self, saved: CheckpointReader) -> None:
        meta = saved.meta
        with saved:
            has_random = load(saved, self.engine)
        self.skip_policy.restore(meta.get("skip_policy", {}))
        self.routing_history.restore(meta.get("routing_history", {}))
        if not has_random:
            self._seed()

    def _seed(self) -> None:
        """Seed this rank's dropout for this step, alike on its tensor-parallel ranks; all ranks initialise
        the model alike.
        """
        number = self.world.rank // self.layout.tensor
        random_state.seed(self.config.seed + 1 + number + 1_000_003 * self.progress.step)

    def _stream_of(self, dataset: Any, start_sample: int, workers: int) -> BatchStream:
        return BatchStream(
            dataset,
            start_sample=start_sample,
            micro_batch_size=self.config.train.micro_batch_size,
            data_rank=self.layout.data_rank(self.world.rank),
            data_size=self.layout.data,
            workers=workers,
            report=lambda line: warn(f"rank {self.world.rank}: {line}"),
            make_batch=self.run.objective.make_batch,
        )
