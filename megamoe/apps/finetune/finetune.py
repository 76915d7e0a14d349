"""Fine-tuning: a training run of each seed, the choice of an epoch, predictions and scores of all sets."""

import gc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megamoe.apps.evaluation.trained_model import Session
from megamoe.apps.finetune.examples import TEST, TRAIN, Examples, Row, read_examples, write_examples
from megamoe.apps.finetune.label_files import ENDING
from megamoe.apps.finetune.results import (
    SeedScores,
    check_libraries,
    digest,
    load_scores,
    open_output,
    print_table,
    results,
    save_results,
    save_scores,
    scores,
)
from megamoe.apps.finetune.runs import (
    data_folder,
    predict,
    pretrained_config,
    run_config,
    run_name,
    tokenizer_of,
)
from megamoe.apps.finetune.task import VALID, Task
from megamoe.checkpoint.format.files import SUMS
from megamoe.checkpoint.format.folder import candidates
from megamoe.checkpoint.format.meta import read_meta
from megamoe.config import RunConfig
from megamoe.config.shapes import moe_layer_numbers
from megamoe.errors import ExitCode
from megamoe.parallel.consensus import catch_error, gather_from_ranks, raise_any_error
from megamoe.train.loop import train

LAYOUT = "parallel."  # of overrides that do not change the result
Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """Options of the command. output: by default `runs/<task>/<name of the pretrained run>`."""

    checkpoint: Path
    output: Path | None = None
    overrides: Sequence[str] = ()
    overwrite: bool = False


def finetune(task: Task, options: Options, session: Session) -> ExitCode:
    """Tune the model of a checkpoint to a task with each of its seeds, and print and write the results.

    A seed that is complete is not repeated, and one that was interrupted goes on. Collective over all ranks.

    Raises:
        UserError: on every rank, for every mistake that a user can correct.
    """
    check_libraries()
    examples = read_examples(task)
    work = _Work.of(task, examples, options, session)
    _on_first(session, lambda: work.open(options.overwrite))
    found: dict[int, SeedScores] = {}
    for number, seed in enumerate(task.seeds, 1):
        done = _on_first(session, partial(work.load, seed))
        if done is None:
            session.world.say(f"seed {seed} ({number} of {len(task.seeds)})")
            code = train(work.configs[seed], leaves=False)
            gc.collect()  # an engine and its parameters refer to each other
            if code is not ExitCode.FINISHED:
                return code
            done = work.evaluate(seed)
        found[seed] = done
        everything = results(task, examples, found, work.about)
        _on_first(session, partial(save_results, work.output, everything))
    if session.world.is_first:
        print_table(everything)
        print(f"results: {work.output / 'results.json'}")
    return ExitCode.FINISHED


def _on_first(session: Session, action: Callable[[], Result]) -> Result:
    """Run an action on the first rank; return its result, or raise its error, on every rank. Collective."""
    results: list[Result] = []
    problem = catch_error(lambda: results.append(action())) if session.world.is_first else None
    raise_any_error(problem)
    return gather_from_ranks(results)[0][0]


@dataclass(frozen=True)
class _Work:
    """What the runs of all seeds have in common. configs: their configurations, by seed."""

    task: Task
    examples: Examples
    output: Path
    session: Session
    configs: dict[int, RunConfig]
    identity: dict[str, Any]
    about: dict[str, Any]

    @classmethod
    def of(cls, task: Task, examples: Examples, options: Options, session: Session) -> "_Work":
        """Find the checkpoint and make the configurations; collective."""
        checkpoint = session.verified(options.checkpoint)
        meta = read_meta(checkpoint, "--checkpoint")
        pretrained = pretrained_config(meta, checkpoint, options.overrides)
        tokenizer = tokenizer_of(task, pretrained, meta["vocabulary"])
        name = str(meta["config"].get("name") or checkpoint.name)
        output = options.output or Path("runs") / task.name / name
        if task.frozen and not moe_layer_numbers(pretrained):
            session.world.say(f"{checkpoint}: a dense model, of which nothing is frozen")
        configs = {
            seed: run_config(
                task,
                examples,
                pretrained,
                tokenizer,
                meta["vocabulary"],
                checkpoint,
                output,
                seed,
                options.overrides,
                session.world.size,
            )
            for seed in task.seeds
        }
        settings = {key: value for key, value in asdict(task).items() if key != "seeds"}
        identity = {
            "task": settings,
            "examples": digest(examples),
            "checkpoint": hashlib.sha256((checkpoint / SUMS).read_bytes()).hexdigest(),
            "overrides": [each for each in options.overrides if not each.startswith(LAYOUT)],
        }
        about = {"checkpoint": name, "path": str(checkpoint), "pretrained_step": meta["step"]}
        return cls(task, examples, output, session, configs, identity, about)

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
        named = {name.removeprefix(TEST): rows for name, rows in predictions.items()}
        of_sets = {
            name.removeprefix(TEST): scores(self.task, self.examples.sets[name], rows)
            for name, rows in predictions.items()
        }
        found = SeedScores(read_meta(checkpoint)["step"], of_sets)
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
        trained = self.session.open(checkpoint, [], ("encoder",))
        found = {
            name: predict(
                trained, str(data_folder(self.output) / f"{name}{ENDING}"), self.task.evaluation_batch_size
            )
            for name in sets
        }
        del trained
        gc.collect()
        return found
