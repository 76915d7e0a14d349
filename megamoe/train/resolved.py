"""The resolved run: everything that follows from the configuration and the number of ranks."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megamoe.config import RunConfig
from megamoe.config.schema import DataConfig
from megamoe.data.stored import source_line
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import Problem, UserError, raise_first
from megamoe.kernels.choice import Kernels
from megamoe.objectives.objective import TrainingObjective, objective_class
from megamoe.optim.schedule import BatchSchedule, run_steps
from megamoe.parallel.launch import World
from megamoe.parallel.zero.deepspeed_config import ParallelPlan, fill_in, resolve_parallel
from megamoe.train.objective import build_objective, data_vocabulary, localized_run, num_added_ids
from megamoe.validation.memory import memory_problems
from megamoe.validation.run import validate
from megamoe.validation.schedule import warmup_problems
from megamoe.validation.training_objective import objective_problems, source_problems


@dataclass(frozen=True)
class ResolvedRun:
    """Values computed once at the start and read by the trainer, the summary and the loop.

    Args:
        config: the checked configuration, with local copies in place of data that URLs name.
        plan: layout, ZeRO stage, precision, offload and the DeepSpeed file's content.
        vocabulary: the vocabulary of the model: that of the data, and after it the objective's own ids.
        schedule: the schedule of the global batch size.
        steps: the steps of the whole run.
        filled_json: the DeepSpeed file completed from the YAML, as JSON text.
        objective: makes batches of the data's samples.
        kernels: what computes the passes of model and optimizer.
        data_source: where the training data comes from, for people.
    """

    config: RunConfig
    plan: ParallelPlan
    vocabulary: Vocabulary
    schedule: BatchSchedule
    steps: int
    filled_json: str
    objective: TrainingObjective
    kernels: Kernels
    data_source: str = ""

    def continued(self, step: int, samples: int) -> "ResolvedRun":
        """Return the run after `step` steps of `samples` samples in all: `train.epochs` counts those."""
        per_epoch = self.objective.samples_per_epoch
        steps = run_steps(self.config, self.schedule, per_epoch, step=step, consumed=samples)
        return replace(self, steps=steps)

    @cached_property
    def sample_tokens(self) -> int:
        """The tokens of a sample that the metrics count, on average."""
        shares = objective_class(self.config).shares(self.config.train.objective.options, self.config)
        return max(1, round(shares.counted * self.config.data.sequence_length))

    @property
    def filled(self) -> dict[str, Any]:
        """Return the dictionary for `deepspeed.initialize`, a new copy each time."""
        return json.loads(self.filled_json)


def resolve_run(config: RunConfig, ranks: int, world: World | None = None) -> ResolvedRun:
    """Check the configuration and compute what follows from it; no rank is started yet.

    world: see `examine`.

    Raises:
        UserError: with the first problem, if the configuration cannot run.
    """
    problems, run = examine(config, ranks, world)
    raise_first(problems)
    assert run is not None
    return run


def examine(
    config: RunConfig, ranks: int, world: World | None = None
) -> tuple[list[Problem], ResolvedRun | None]:
    """Return every reason why a run on so many ranks cannot start, and the run if there is none.

    The data is read once its kind fits the objective. What needs a run that is right so far comes last: the
    length in epochs, and the memory.

    world: with it, the least memory that a rank needs is compared with this machine's.
    """
    problems: list[Problem] = []
    plan, vocabulary, run = None, None, None
    with _noted(problems):
        plan = resolve_parallel(config, ranks)
    problems += validate(config, ranks, plan)
    named, located = config.data, None
    with _noted(problems):
        located = localized_run(config)
    if located is not None and not any(objective_problems(config)):
        config = located
        sources = list(source_problems(config))
        problems += sources
        with _noted(problems):
            vocabulary = None if sources else _vocabulary(config)
    if problems or plan is None or vocabulary is None:
        return problems, None
    with _noted(problems):
        run = _resolved(config, named, plan, vocabulary)
        problems += warmup_problems(config, run.steps)
        problems += () if world is None else memory_problems(config, plan, world, vocabulary.size)
    return problems, run


@contextmanager
def _noted(problems: list[Problem]) -> Iterator[None]:
    """Add a UserError to the problems."""
    try:
        yield
    except UserError as error:
        problems.append(Problem.of(error))


def _vocabulary(config: RunConfig) -> Vocabulary:
    """Return the vocabulary of the data, and after it the objective's own ids."""
    vocabulary = data_vocabulary(config)
    return vocabulary.with_added(num_added_ids(config, vocabulary), config.model.vocab_size)


def _resolved(
    config: RunConfig, named: DataConfig, plan: ParallelPlan, vocabulary: Vocabulary
) -> ResolvedRun:
    schedule = BatchSchedule.from_config(config.train, plan.layout.data)
    objective = build_objective(config, vocabulary)
    filled = fill_in(config, plan, schedule.accumulation_at(0))
    source = source_line(named, config.data)
    kernels, filled_json = Kernels.of(config.model), json.dumps(filled)
    run = ResolvedRun(config, plan, vocabulary, schedule, 0, filled_json, objective, kernels, source)
    return run.continued(step=0, samples=0)
