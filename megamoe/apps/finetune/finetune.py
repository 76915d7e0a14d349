"""Fine-tuning: a training run of each seed, the choice of an epoch, predictions and scores of all sets."""

import gc
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from megamoe.apps.evaluation.trained_model import Session, TrainedModel, configuration_of
from megamoe.apps.finetune.examples import TEST, TRAIN, Examples, Row, read_examples, write_examples
from megamoe.apps.finetune.label_files import ENDING
from megamoe.apps.finetune.objectives.labelled import Example, Labelled
from megamoe.apps.finetune.results import (
    SeedScores,
    check_libraries,
    digest,
    load_scores,
    open_output,
    results,
    save_results,
    save_scores,
    scores,
    table_of,
)
from megamoe.apps.finetune.task import VALID, Task
from megamoe.checkpoint.format.files import SUMS
from megamoe.checkpoint.format.folder import candidates
from megamoe.checkpoint.format.meta import Meta, read_meta
from megamoe.config import RunConfig, configure, to_dict
from megamoe.config.shapes import moe_layer_numbers
from megamoe.data.batches import Batch, Item
from megamoe.data.tokenizers import load_tokenizer
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import ExitCode, UserError
from megamoe.parallel.consensus import catch_error, gather_from_ranks, raise_any_error
from megamoe.parallel.layout import Layout
from megamoe.resilience.run_status import stopped_at
from megamoe.train.loop import train
from megamoe.train.micro_batch import micro_batch_of
from megamoe.train.objective import data_vocabulary, num_added_ids
from megamoe.train.step import model_inputs

NO_RESULT = ("parallel.", "train.exit_after_")  # beginnings of overrides that do not change the result
Result = TypeVar("Result")
ENCODER = "encoder"
PROGRESS_LINES = 20  # about as many of a run
KEEP_ALL = 10**6  # checkpoints, the most that the key allows
INIT = "checkpoint.init"
OWN = ("name", "output", "seed", INIT, "checkpoint.resume", "data.sources", "data.split")  # of no override


def finetune(
    task: Task,
    session: Session,
    checkpoint: Path,
    output: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    overwrite: bool = False,
    bad_lines: str = "error",
) -> ExitCode:
    """Tune the model of a checkpoint to a task with each of its seeds, and print and write the results.

    output: by default `runs/<task>/<name of the pretrained run>`. bad_lines: see `read_examples`.

    A seed that is complete is not repeated, and one that was interrupted goes on. A seed that a signal or
    `train.exit_after_*` stops ends the call. Collective over all ranks.

    Raises:
        UserError: on every rank, for every mistake that a user can correct.
    """
    check_libraries()
    examples = read_examples(task, bad_lines)
    if left_out := examples.left_out:
        session.world.say(f"bad lines left out: {len(left_out)}, the first: {left_out[0]}")
    work = _Work(task, examples, session, checkpoint, output, overrides)
    _on_first(session, lambda: work.open(overwrite))
    found: dict[int, SeedScores] = {}
    for number, seed in enumerate(task.seeds, 1):
        done = _on_first(session, partial(work.load, seed))
        if done is None:
            session.world.say(f"seed {seed} ({number} of {len(task.seeds)})")
            code = train(work.configs[seed], leaves=False)
            gc.collect()  # an engine and its parameters refer to each other
            if code is not ExitCode.FINISHED:
                return code
            if (stop := _on_first(session, partial(stopped_at, work.output / run_name(seed)))) is not None:
                step, steps = stop
                session.world.say(
                    f"seed {seed}: stopped at step {step} of {steps}; repeat the command to go on"
                )
                return ExitCode.STOPPED
            done = work.evaluate(seed)
        found[seed] = done
        everything = results(task, examples, found, work.about)
        _on_first(session, partial(save_results, work.output, everything))
    if session.world.is_first:
        print(f"{table_of(everything)}\nresults: {work.output / 'results.json'}")
    return ExitCode.FINISHED


def _on_first(session: Session, action: Callable[[], Result]) -> Result:
    """Run an action on the first rank; return its result, or raise its error, on every rank. Collective."""
    results: list[Result] = []
    problem = catch_error(lambda: results.append(action())) if session.world.is_first else None
    raise_any_error(problem)
    return gather_from_ranks(results)[0][0]


class _Work:
    """What the runs of all seeds have in common. configs: their configurations, by seed."""

    def __init__(
        self,
        task: Task,
        examples: Examples,
        session: Session,
        path: Path,
        output: Path | None,
        overrides: Sequence[str],
    ) -> None:
        """Find the checkpoint and make the configurations; collective."""
        checkpoint = session.verified(path)
        meta = read_meta(checkpoint, "--checkpoint")
        pretrained = pretrained_config(meta, checkpoint, overrides)
        session.tell_changes(pretrained, meta)
        tokenizer = tokenizer_of(task, pretrained, meta["vocabulary"])
        name = str(meta["config"].get("name") or checkpoint.name)
        self.task, self.examples, self.session = task, examples, session
        self.output = output or Path("runs") / task.name / name
        if task.frozen and not moe_layer_numbers(pretrained):
            session.world.say(f"{checkpoint}: a dense model, of which nothing is frozen")
        tree = run_tree(task, examples, pretrained, tokenizer, meta["vocabulary"], checkpoint, self.output)
        ranks = session.world.size
        self.configs = {seed: run_config(task, tree, seed, overrides, ranks) for seed in task.seeds}
        settings = {key: value for key, value in asdict(task).items() if key != "seeds"}
        self.identity = {
            "task": settings,
            "examples": digest(examples),
            "checkpoint": hashlib.sha256((checkpoint / SUMS).read_bytes()).hexdigest(),
            "overrides": [each for each in overrides if not each.startswith(NO_RESULT)],
        }
        self.about = {"checkpoint": name, "path": str(checkpoint), "pretrained_step": meta["step"]}

    @property
    def sets(self) -> list[str]:
        """The names of the sets that are scored: `valid` and `test.NAME`."""
        return [name for name in self.examples.sets if name != TRAIN]

    def open(self, overwrite: bool) -> None:
        """Make the output folder and the examples that the runs read; on the first rank."""
        open_output(self.output, self.identity, overwrite)
        write_examples(self.examples, data_folder(self.output))

    def load(self, seed: int) -> SeedScores | None:
        """Return the scores of a seed that is complete; on the first rank."""
        sets = [name.removeprefix(TEST) for name in self.sets]
        return load_scores(self.output / run_name(seed), sets, self.task.metric_names)

    def evaluate(self, seed: int) -> SeedScores:
        """Predict all sets with the selected model, save predictions and scores; collective."""
        folder = self.output / run_name(seed)
        checkpoint = self._selected(folder)
        predictions = self._predictions(checkpoint, self.sets)
        found = SeedScores(read_meta(checkpoint)["step"], {})
        for name, rows in predictions.items():
            found.sets[name.removeprefix(TEST)] = scores(self.task, self.examples.sets[name], rows)
        named = {name.removeprefix(TEST): rows for name, rows in predictions.items()}
        _on_first(self.session, lambda: save_scores(folder, found, named))
        return found

    def _selected(self, folder: Path) -> Path:
        """Return the last checkpoint of a run, or the one that scores best on the validation set."""
        checkpoints = gather_from_ranks(candidates(folder / "checkpoints"))[0]
        if self.task.select == "last":
            return checkpoints[0]
        metric = self.task.metric_names[0]
        rated: list[tuple[float, Path]] = []
        for path in sorted(checkpoints):
            rows = self._predictions(path, [VALID])[VALID]
            rated.append((scores(self.task, self.examples.sets[VALID], rows)[metric], path))
            self.session.world.say(f"{path.name}: {metric} of valid {rated[-1][0]:.4f}")
        # Of equal scores the first; one that is not defined is never better.
        return max(rated, key=lambda pair: pair[0] if pair[0] == pair[0] else float("-inf"))[1]

    def _predictions(self, checkpoint: Path, sets: list[str]) -> dict[str, list[Row]]:
        """Return the predictions of the sets by a checkpoint's model."""
        trained, size = self.session.open(checkpoint, [], (ENCODER,)), self.task.evaluation_batch_size
        folder = data_folder(self.output)
        found = {name: predict(trained, str(folder / f"{name}{ENDING}"), size) for name in sets}
        del trained
        gc.collect()
        return found


def pretrained_config(meta: Meta, checkpoint: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration that a checkpoint was trained with.

    Raises:
        UserError: if its model is no encoder, or needs plugins that the overrides do not name.
    """
    plugins = [override for override in overrides if override.startswith("plugins=")]
    config = configuration_of(meta, checkpoint, plugins)
    if config.model.architecture != ENCODER:
        raise UserError(
            f"{checkpoint}: saved with model.architecture {config.model.architecture}; tasks need an "
            f"{ENCODER}, such as a masked language model"
        )
    return config


def tokenizer_of(task: Task, pretrained: RunConfig, vocabulary: int) -> str:
    """Return the task's tokenizer, or that of the pretraining data.

    vocabulary: the size of the pretrained model's, with the ids that its objective added.

    Raises:
        UserError: if there is none, or the task's is not that of the pretraining data, or, without this data,
            has another size than the model's vocabulary.
    """
    try:
        known, problem = data_vocabulary(pretrained).tokenizer, "it has none"
    except UserError as error:
        known, problem = None, str(error)
    if task.tokenizer is None:
        if known is None:
            raise UserError(
                f"the tokenizer of the pretraining data cannot be found: {problem}; give tokenizer in the "
                "task file"
            )
        return known.name
    tokenizer = load_tokenizer(task.tokenizer)
    found = Vocabulary(tokenizer.vocab_size, tokenizer.eod, tokenizer, tokenizer.special)
    size = found.size + num_added_ids(pretrained, found)
    if known is not None:
        other, expected = known.fingerprint != tokenizer.fingerprint, repr(known.name)
    else:  # a configured size may be larger than the vocabulary
        other = size > vocabulary if pretrained.model.vocab_size else size != vocabulary
        expected = f"one of {vocabulary} ids"
    if other:
        raise UserError(
            f"tokenizer: {tokenizer.name!r} has {size} ids and is not that of the pretrained model; "
            f"expected {expected}: correct it, or leave it out"
        )
    return task.tokenizer


def run_config(
    task: Task, tree: dict[str, Any], seed: int, overrides: Sequence[str], ranks: int
) -> RunConfig:
    """Return the configuration of a seed's run, `<output>/seed_<seed>`.

    tree: of `run_tree`. overrides: `section.key=value`, after the task's.

    Raises:
        UserError: if the result is no configuration.
    """
    changes = [*_overrides(task.run), *overrides]
    for override in changes:
        if (key := override.partition("=")[0]) in OWN or key.startswith(f"{INIT}."):
            raise UserError(f"{key}: tools/finetune.py sets this key of a seed's run itself; leave it out")
    config = configure({**tree, "name": run_name(seed), "seed": seed}, changes, source="task")
    if not any(each.startswith("train.micro_batch_size=") for each in changes):
        # The run itself refuses a batch or a layout that does not divide.
        data = max(1, Layout(ranks, config.parallel.tensor).data)
        config.train.micro_batch_size = task.micro_batch_size or max(1, task.batch_size // data)
    return config


def _overrides(run: dict[str, Any], before: str = "") -> list[str]:
    """Return the task's `run` as overrides; a mapping changes the keys that it has, and no others."""
    found = []
    for key, value in run.items():
        if isinstance(value, dict) and value:
            found += _overrides(value, f"{before}{key}.")
        else:
            found.append(f"{before}{key}={json.dumps(value)}")
    return found


def run_name(seed: int) -> str:
    """Return the name of a seed's run, which is its folder."""
    return f"seed_{seed}"


def data_folder(output: Path) -> Path:
    """Return the folder of the examples that the runs read."""
    return output / "data"


def run_tree(
    task: Task,
    examples: Examples,
    pretrained: RunConfig,
    tokenizer: str,
    vocabulary: int,
    checkpoint: Path,
    output: Path,
) -> dict[str, Any]:
    """Return what the configurations of all seeds have in common; vocabulary: the pretrained model's size."""
    kind, saved = task.kind_of_task, to_dict(pretrained)
    objective: dict[str, Any] = {"name": kind.objective, "too_long": task.too_long}
    if kind.predicts == "span":
        objective["longest"] = task.longest_answer
    steps_per_epoch = max(1, len(examples.sets[TRAIN]) // task.batch_size)
    valid = math.ceil(len(examples.sets.get(VALID, [])) / task.batch_size)
    best = task.select == "best"
    return {
        "output": str(output),
        "plugins": saved["plugins"],
        "model": saved["model"]
        | {
            "num_labels": len(examples.labels) if kind.outputs is None else kind.outputs,
            "predicts": kind.predicts,
            "head_transform": False,
            "logit_scale": 1.0,
            "logit_soft_cap": None,
            "vocab_size": vocabulary,
            "hidden_dropout": task.dropout,
            "attention_dropout": task.dropout,
        },
        "moe": saved["moe"] | {"frozen": task.frozen if moe_layer_numbers(pretrained) else []},
        "data": {
            "sources": str(data_folder(output) / f"{TRAIN}{ENDING}"),
            "split": [0.9, 0.1, 0.0] if VALID in examples.sets else [1.0, 0.0, 0.0],
            "tokenizer": tokenizer,
            "sequence_length": task.sequence_length or pretrained.data.sequence_length,
            "workers": 0,
        },
        "optimizer": {
            "lr": task.learning_rate,
            "schedule": task.schedule,
            "warmup_share": task.warmup_share,
            "weight_decay": task.weight_decay,
        },
        "train": {"objective": objective, "epochs": task.epochs, "global_batch_size": task.batch_size},
        "evaluation": {"every": steps_per_epoch if valid else 0, "batches": valid},
        "checkpoint": {
            "init": {"path": str(checkpoint)},
            "resume": "auto",
            "every": steps_per_epoch if best else 0,
            "keep": KEEP_ALL if best else 1,
        },
        "log": {"report": False, "every": max(1, int(task.epochs * steps_per_epoch) // PROGRESS_LINES)},
    }


@torch.no_grad()
def predict(trained: TrainedModel, path: str, batch_size: int) -> list[Row]:
    """Return what the model predicts of each example of a file, in its order. Collective over all ranks.

    The examples are sorted by length and cut into batches, which go to the data-parallel ranks in turn. The
    batches, and so their capacities, are the same at every layout.

    Raises:
        UserError: as `Labelled.open`.
    """
    objective = trained.objective
    assert isinstance(objective, Labelled)
    examples = objective.open(path)
    order = sorted(range(len(examples)), key=lambda place: len(examples[place].tokens_S))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    data = trained.layout.data
    found: dict[int, Row] = {}
    for round_ in range(-(-len(batches) // data)):
        number = round_ * data + trained.layout.data_rank(trained.world.rank)
        # Every rank takes part in every round: experts may lie on several of them.
        places = batches[number] if number < len(batches) else []
        found |= _predicted(trained, objective, examples, places, number)
    everything: dict[int, Row] = {}
    for part in gather_from_ranks(found):
        everything |= part
    return [everything[place] for place in range(len(examples))]


def _predicted(
    trained: TrainedModel, objective: Labelled, examples: list[Example], places: list[int], number: int
) -> dict[int, Row]:
    """Return the predictions of a batch, by the examples' numbers."""
    items: list[Item] = [examples[place].item() for place in places] or [objective.no_item()]
    batch: Batch = objective.make_batch(items, places or [0]).to(trained.world.device)
    trained.context.batch = micro_batch_of(batch, number)
    trained.model(**model_inputs(batch))
    logits = trained.model.label_logits()
    assert logits is not None
    host = logits.float().cpu()
    return {place: objective.prediction(examples[place], host[row]) for row, place in enumerate(places)}
