"""The composition root: reads like the order of the work. Checks first, then ranks, data, model, engine."""

import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.config import RunConfig, to_dict
from megamoe.data.batches import Batch, BatchStream
from megamoe.data.datasets import Datasets, build_datasets
from megamoe.data.vocabulary import Vocabulary, resolve_vocabulary
from megamoe.errors import UserError
from megamoe.model.gpt import GPT, build_gpt
from megamoe.moe.part import StepContext
from megamoe.parallel import launch, random_state
from megamoe.parallel.agreement import agree, agree_quickly, attempt
from megamoe.parallel.checkpoints.initial_weights import load_initial_weights
from megamoe.parallel.checkpoints.run import Checkpoints
from megamoe.parallel.engine import Engine
from megamoe.parallel.experts import hosted_layer_factory
from megamoe.parallel.groups import data_group, start_groups
from megamoe.parallel.layout import Layout
from megamoe.parallel.zero.deepspeed_config import fill_in, read_deepspeed_config
from megamoe.train.check import check_run
from megamoe.train.resume import check_init, check_resume
from megamoe.train.run_folder import RunFolder, choose_run_folder
from megamoe.train.schedule import BatchSchedule, learning_rate
from megamoe.train.step import StepRecord, evaluate, train_step


@dataclass
class Progress:
    """Where the run stands: what a checkpoint must bring back besides tensors.

    samples, micro_batches: taken so far, over all ranks. A resumed run may cut its batches otherwise, so the
    one does not follow from the other. skipped_steps: of the steps, those whose fp16 gradients overflowed.
    """

    step: int = 0
    samples: int = 0
    micro_batches: int = 0
    skipped_steps: int = 0


class Trainer:
    """A run that is ready: one `step` at a time, evaluated and saved when the loop says so.

    Raises (when built):
        UserError: for everything that a user can put right, before ranks are started where possible.
    """

    def __init__(self, config: RunConfig, world: launch.World | None = None) -> None:
        self.config = config
        if config.parallel.tensor > 1:
            launch.order_device_queues()
        self.world = world or launch.find_world()
        check_run(config, self.world.size)
        self.layout = Layout.of(config.parallel, self.world.size)
        self.vocabulary: Vocabulary = resolve_vocabulary(config.data, config.model.vocab_size)
        self.folder: RunFolder = choose_run_folder(config)
        self.schedule = BatchSchedule.from_config(config.train, self.layout.data)
        # For its refusals alone; the engine, which comes after the ranks' start, does it again.
        content = read_deepspeed_config(config.parallel.deepspeed)
        fill_in(config, content, self.layout.data, self.schedule.accumulation_at(0))
        if self.folder.resume_from is not None:
            check_resume(config, self.vocabulary.size, self.layout, content, self.folder.resume_from)
        elif config.checkpoint.init.path is not None:
            check_init(config, self.vocabulary.size, self.folder.path)
        launch.start(self.world, config.parallel.timeout_minutes)
        groups = start_groups(self.layout, config.parallel.timeout_minutes)
        self.datasets: Datasets = self._build_datasets()
        self.context = StepContext(
            seed=config.seed, data_group=data_group() if self.layout.data > 1 else None
        )
        make_moe_layer = hosted_layer_factory(config.moe, self.context, groups, self.layout)
        model = build_gpt(config, self.vocabulary.size, make_moe_layer)
        self.checkpoints = Checkpoints(self.folder.checkpoints, config.checkpoint.keep)
        if self.folder.resume_from is None:
            self._begin_from(model)
        else:
            self.checkpoints.load_weights(self.folder.resume_from, model, self.layout, self.world.rank)
        self.engine = Engine(config, model, self.world, self.schedule.accumulation_at(0))
        # After the build, which every rank draws alike; dropout differs from one micro batch to another.
        random_state.seed(config.seed + 1 + self.layout.data_rank(self.world.rank))
        self.progress = Progress()
        if self.folder.resume_from is not None:
            self._resume(self.folder.resume_from)
        self.engine.train(True)
        self._stream = self._open_stream()

    def step(self) -> tuple[StepRecord, dict[str, Any]]:
        """One optimiser step; returns its record and the metrics under the names of metrics.jsonl."""
        started = time.perf_counter()
        size = self.schedule.size_at(self.progress.samples)
        batches = self._take(self._stream, size // self.schedule.unit)
        self.context.step = self.progress.step + 1
        lr = learning_rate(self.context.step, self.config.optimizer, self.config.train.steps)
        smoothing, before = self.config.train.label_smoothing, self.progress.micro_batches
        scale = self.engine.loss_scale
        record = train_step(self.engine, self.context, batches, lr, smoothing, before)
        self._check_finite(record)
        if not record.skipped:
            self._after_step(record)
        self.progress.step += 1
        self.progress.skipped_steps += record.skipped
        self.progress.samples += size
        self.progress.micro_batches += record.micro_batches
        seconds = time.perf_counter() - started
        length = self.config.data.sequence_length
        metrics = {
            "step": self.progress.step,
            "tokens": self.progress.samples * length,
            "time": time.time(),
            **record.metrics(),
            **self._scaling_metrics(scale),
            "train/lr": lr,
            "train/batch_size": size,
            "perf/tokens_per_s": size * length / seconds,
            "perf/step_s": seconds,
        }
        return record, metrics

    def _scaling_metrics(self, scale: float) -> dict[str, float]:
        """Of fp16: the step's loss scale, and the steps skipped since the run's start."""
        if self.engine.precision != "fp16":
            return {}
        return {"train/loss_scale": scale, "train/skipped_steps": self.progress.skipped_steps}

    def evaluate(self, at_end: bool = False) -> dict[str, float]:
        """Loss of every validation set, and at the end of the test set, under the names of metrics.jsonl."""
        sets = {
            "val" if name == "valid" else f"val/{name}": d for name, d in self.datasets.validation.items()
        }
        if at_end and self.datasets.test is not None:
            sets["test"] = self.datasets.test
        return {f"{name}/lm_loss": self._loss_on(dataset) for name, dataset in sets.items()}

    def _loss_on(self, dataset: Any) -> float:
        micro_batches = self.config.evaluation.batches * self.schedule.final // self.schedule.unit
        with self._stream_of(dataset, start_sample=0, workers=0) as stream:
            batches = (self._take(stream, 1)[0] for _ in range(micro_batches))
            return evaluate(self.engine, self.context, batches)

    def _take(self, stream: BatchStream, count: int) -> list[Batch]:
        """This rank's next micro batches; where any rank cannot read its own, all end alike."""
        batches: list[Batch] = []
        problem = None
        try:
            batches += itertools.islice(stream, count)
        except UserError as error:
            problem = str(error)
        agree_quickly(problem, self.world.device)
        return batches

    def save(self) -> Path:
        """Write a checkpoint of the present step."""
        state = {
            "samples": self.progress.samples,
            "micro_batches": self.progress.micro_batches,
            "skipped_steps": self.progress.skipped_steps,
            "tokens": self.progress.samples * self.config.data.sequence_length,
            "vocabulary": self.vocabulary.size,
            "config": to_dict(self.config),
        }
        return self.checkpoints.save(self.engine, self.progress.step, state)

    def close(self) -> None:
        """End the loader processes and leave the process group."""
        self._stream.close()
        launch.stop()

    def _after_step(self, record: StepRecord) -> None:
        """What the layers learn outside the gradient."""
        constraints = []
        model = self.engine.model
        assert isinstance(model, GPT)
        for number, layer in model.moe_layers():
            with self.engine.gathered(layer.parameters_after_step()):
                layer.after_step(record.layers[number].wanted_E.to(self.world.device))
            constraints += layer.constraints()
        self.engine.project(constraints)

    def _check_finite(self, record: StepRecord) -> None:
        """A broken step ends the run on every rank, before anything of it is saved."""
        if math.isfinite(record.lm_loss) and (math.isfinite(record.grad_norm) or record.skipped):
            return
        last = self.checkpoints.latest()
        way_out = f"go on from {last}" if last else "begin anew"
        raise UserError(
            f"step {self.context.step}: train/lm_loss is {record.lm_loss}, train/grad_norm is "
            f"{record.grad_norm}; the step was not applied. Lower optimizer.lr or lengthen "
            f"optimizer.warmup_steps, and {way_out}"
        )

    def _build_datasets(self) -> Datasets:
        config = self.config
        return build_datasets(
            config.data,
            self.vocabulary,
            seed=config.seed,
            train_samples=self.schedule.total_samples(config.train.steps),
            validation_samples=config.evaluation.batches * self.schedule.final,
        )

    def _begin_from(self, model: GPT) -> None:
        """Take the weights that a new run starts from; say what did not come from there."""
        init, frozen = self.config.checkpoint.init, self.config.moe.frozen
        if init.path is None:
            if frozen:
                self._say(f"moe.frozen: {' and '.join(frozen)} as drawn, for checkpoint.init.path is not set")
            return
        path, expert_rank = Path(init.path), self.layout.expert_rank(self.world.rank)
        kept: list[str] = []
        agree(attempt(lambda: kept.extend(load_initial_weights(model, path, init.experts, expert_rank))))
        rest = f"; of the MoE layers as drawn: {', '.join(kept)}" if kept else ""
        self._say(f"weights from {path}, experts: {init.experts}{rest}")

    def _say(self, line: str) -> None:
        if self.world.is_first:
            print(line)

    def _resume(self, path: Path) -> None:
        meta = self.checkpoints.load(path, self.engine)
        # Earlier checkpoints do not have this count.
        estimate = meta["samples"] // self.schedule.unit * self.layout.data
        self.progress = Progress(
            meta["step"],
            meta["samples"],
            meta.get("micro_batches", estimate),
            meta.get("skipped_steps", 0),
        )

    def _open_stream(self) -> BatchStream:
        return self._stream_of(self.datasets.train, self.progress.samples, self.config.data.workers)

    def _stream_of(self, dataset: Any, start_sample: int, workers: int) -> BatchStream:
        return BatchStream(
            dataset,
            start_sample=start_sample,
            micro_batch_size=self.config.train.micro_batch_size,
            data_rank=self.layout.data_rank(self.world.rank),
            data_size=self.layout.data,
            workers=workers,
        )
