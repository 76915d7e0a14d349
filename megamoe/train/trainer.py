"""The composition root: reads like the order of the work. Checks first, then ranks, data, model, engine."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megamoe.config import RunConfig, to_dict
from megamoe.data.batches import Batch, BatchStream
from megamoe.data.datasets import Datasets, build_datasets
from megamoe.data.vocabulary import Vocabulary, resolve_vocabulary
from megamoe.errors import UserError
from megamoe.model.gpt import build_gpt
from megamoe.moe.part import StepContext
from megamoe.parallel import launch, random_state
from megamoe.parallel.checkpoint import Checkpoints, read_meta
from megamoe.parallel.deepspeed_config import fill_in, read_deepspeed_config
from megamoe.parallel.engine import Engine
from megamoe.parallel.experts import hosted_layer_factory
from megamoe.train.check import check_run
from megamoe.train.run_folder import RunFolder, choose_run_folder
from megamoe.train.schedule import BatchSchedule, learning_rate
from megamoe.train.step import StepRecord, evaluate, train_step


@dataclass
class Progress:
    """Where the run stands: what a checkpoint must bring back besides tensors."""

    step: int = 0
    samples: int = 0


class Trainer:
    """A run that is ready: one `step` at a time, evaluated and saved when the loop says so.

    Raises (when built):
        UserError: for everything that a user can put right, before ranks are started where possible.
    """

    def __init__(self, config: RunConfig, world: launch.World | None = None) -> None:
        self.config = config
        self.world = world or launch.find_world()
        check_run(config, self.world.size)
        self.vocabulary: Vocabulary = resolve_vocabulary(config.data, config.model.vocab_size)
        self.folder: RunFolder = choose_run_folder(config)
        if self.folder.resume_from is not None:
            _check_same_model(config, self.vocabulary, self.folder.resume_from)
        self.schedule = BatchSchedule.from_config(config.train, self.world.size)
        # For its refusals alone; the engine, which comes after the ranks' start, does it again.
        content = read_deepspeed_config(config.parallel.deepspeed)
        fill_in(config, content, self.world.size, self.schedule.accumulation_at(0))
        launch.start(self.world, config.parallel.timeout_minutes)
        self.datasets: Datasets = self._build_datasets()
        self.context = StepContext(seed=config.seed)
        make_moe_layer = hosted_layer_factory(config.moe, self.context, config.parallel.expert)
        model = build_gpt(config, self.vocabulary.size, make_moe_layer)
        self.engine = Engine(config, model, self.world, self.schedule.accumulation_at(0))
        # After the build, which every rank draws alike; dropout differs from rank to rank.
        random_state.seed(config.seed + 1 + self.world.rank)
        self.checkpoints = Checkpoints(
            self.folder.checkpoints, config.checkpoint.keep, config.parallel.expert
        )
        self.progress = Progress()
        if self.folder.resume_from is not None:
            self._resume(self.folder.resume_from)
        self.engine.train(True)
        self._stream = self._open_stream()

    def step(self) -> tuple[StepRecord, dict[str, Any]]:
        """One optimiser step; returns its record and the metrics under the names of metrics.jsonl."""
        started = time.perf_counter()
        size = self.schedule.size_at(self.progress.samples)
        batches = [next(self._stream) for _ in range(size // self.schedule.unit)]
        self.context.step = self.progress.step + 1
        lr = learning_rate(self.context.step, self.config.optimizer, self.config.train.steps)
        record = train_step(self.engine, self.context, batches, lr, self.config.train.label_smoothing)
        self.progress.step += 1
        self.progress.samples += size
        seconds = time.perf_counter() - started
        length = self.config.data.sequence_length
        metrics = {
            "step": self.progress.step,
            "tokens": self.progress.samples * length,
            "time": time.time(),
            **record.metrics(),
            "train/lr": lr,
            "train/batch_size": size,
            "perf/tokens_per_s": size * length / seconds,
            "perf/step_s": seconds,
        }
        return record, metrics

    def evaluate(self) -> dict[str, float]:
        """Validation loss of every set, under the names of metrics.jsonl."""
        results = {}
        micro_batches = self.config.evaluation.batches * self.schedule.final // self.schedule.unit
        for name, dataset in self.datasets.validation.items():
            with self._stream_of(dataset, start_sample=0, workers=0) as stream:
                loss = evaluate(self.engine, self.context, _take(stream, micro_batches))
            results["val/lm_loss" if name == "valid" else f"val/{name}/lm_loss"] = loss
        return results

    def save(self) -> Path:
        """Write a checkpoint of the present step."""
        state = {
            "samples": self.progress.samples,
            "tokens": self.progress.samples * self.config.data.sequence_length,
            "vocabulary": self.vocabulary.size,
            "config": to_dict(self.config),
        }
        return self.checkpoints.save(self.engine, self.progress.step, state)

    def close(self) -> None:
        """End the loader processes and leave the process group."""
        self._stream.close()
        launch.stop()

    def _build_datasets(self) -> Datasets:
        config = self.config
        return build_datasets(
            config.data,
            self.vocabulary,
            seed=config.seed,
            train_samples=self.schedule.total_samples(config.train.steps),
            validation_samples=config.evaluation.batches * self.schedule.final,
        )

    def _resume(self, path: Path) -> None:
        meta = self.checkpoints.load(path, self.engine)
        self.progress = Progress(meta["step"], meta["samples"])

    def _open_stream(self) -> BatchStream:
        return self._stream_of(self.datasets.train, self.progress.samples, self.config.data.workers)

    def _stream_of(self, dataset: Any, start_sample: int, workers: int) -> BatchStream:
        return BatchStream(
            dataset,
            start_sample=start_sample,
            micro_batch_size=self.config.train.micro_batch_size,
            data_rank=self.world.rank,
            data_size=self.world.size,
            workers=workers,
        )


def _take(stream: BatchStream, count: int) -> list[Batch]:
    return [next(stream) for _ in range(count)]


def _check_same_model(config: RunConfig, vocabulary: Vocabulary, path: Path) -> None:
    """Refuse a checkpoint of another shape, naming the first key that differs."""
    meta = read_meta(path)
    saved, now = meta["config"], to_dict(config)
    for section in ("model", "moe"):
        for key, value in now[section].items():
            before = saved[section].get(key, value)
            if key not in ("losses", "hidden_dropout", "attention_dropout", "vocab_size") and before != value:
                raise UserError(
                    f"{path}: saved with {section}.{key} {_short(before)}, this run has {_short(value)}; "
                    "resume with the configuration that saved it"
                )
    for name, before, value in (
        ("vocabulary", meta["vocabulary"], vocabulary.size),
        ("data.sequence_length", saved["data"]["sequence_length"], config.data.sequence_length),
    ):
        if before != value:
            raise UserError(
                f"{path}: saved with {name} {before}, this run has {value}; resume with the same one"
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."
