"""The resolved run: everything that follows from the configuration and the number of ranks."""

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megamoe.config import RunConfig
from megamoe.data.vocabulary import Vocabulary
from megamoe.objectives.objective import TrainingObjective
from megamoe.optim.schedule import BatchSchedule, run_steps
from megamoe.parallel.zero.deepspeed_config import ParallelPlan, fill_in, resolve_parallel
from megamoe.train.objective import build_objective, data_vocabulary, num_added_ids, sample_tokens
from megamoe.validation.objective import check_sources
from megamoe.validation.run import check_run


@dataclass(frozen=True)
class ResolvedRun:
    """Values computed once at the start and read by the trainer, the summary and the loop.

    Args:
        config: the checked configuration.
        plan: layout, ZeRO stage, precision, offload and the DeepSpeed file's content.
        vocabulary: the vocabulary of the model: that of the data, and after it the objective's own ids.
        schedule: the schedule of the global batch size.
        steps: the steps of the whole run.
        filled_json: the DeepSpeed file completed from the YAML, as JSON text.
        objective: makes batches of the data's samples.
    """

    config: RunConfig
    plan: ParallelPlan
    vocabulary: Vocabulary
    schedule: BatchSchedule
    steps: int
    filled_json: str
    objective: TrainingObjective

    @cached_property
    def sample_tokens(self) -> int:
        """The tokens of a sample that the metrics count, on average."""
        return sample_tokens(self.config)

    @property
    def filled(self) -> dict[str, Any]:
        """Return the dictionary for `deepspeed.initialize`, a new copy each time."""
        filled: dict[str, Any] = json.loads(self.filled_json)
        return filled


def resolve_run(config: RunConfig, ranks: int) -> ResolvedRun:
    """Check the configuration and compute what follows from it; no rank is started yet.

    Raises:
        UserError: naming the key, if the configuration cannot run.
    """
    plan = resolve_parallel(config, ranks)
    check_run(config, plan)
    check_sources(config)
    vocabulary = data_vocabulary(config)
    vocabulary = vocabulary.with_added(num_added_ids(config, vocabulary), config.model.vocab_size)
    schedule = BatchSchedule.from_config(config.train, plan.layout.data)
    objective = build_objective(config, vocabulary)
    steps = run_steps(config, schedule, objective.samples_per_epoch)
    filled = fill_in(config, plan, schedule.accumulation_at(0))
    return ResolvedRun(config, plan, vocabulary, schedule, steps, json.dumps(filled), objective)
