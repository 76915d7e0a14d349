"""Steps of all candidates in turn, then the parts of ours."""

from collections.abc import Callable
from dataclasses import dataclass, field

from common.rounds import in_turn
from layers.candidate import NotMeasured
from megamoe.config import RunConfig
from steps.candidate import Candidate, StepTime
from steps.flat_adamw import FlatAdamW
from steps.ours import Ours
from steps.parts import PartTimers
from steps.transformers_model import TransformersModel

FLAT = "flat AdamW"
WARM_UP_ROUNDS = 2
MOST_PART_ROUNDS = 9

Parts = dict[tuple[str, str], float]


@dataclass
class Measured:
    """By candidate, times of every round; of ours, in `parts`, step and parts in every round with hooks.

    parameters, updated: numbers of parameters, see `Candidate`. tokens: of a step, over all ranks.
    """

    precision: str
    tokens: int
    steps: dict[str, list[StepTime]]
    parts: dict[str, list[tuple[StepTime, Parts]]]
    parameters: dict[str, int]
    updated: dict[str, int]
    left_out: dict[str, str] = field(default_factory=dict)

    def seconds(self, name: str, what: str) -> list[float]:
        """Return an attribute of StepTime of every round."""
        return [getattr(step, what) for step in self.steps[name]]


def part_rounds(rounds: int) -> int:
    """Return how many rounds with hooks follow so many without."""
    return min(rounds, MOST_PART_ROUNDS)


def steps_needed(rounds: int) -> int:
    """Return how many steps each of our trainers takes."""
    return WARM_UP_ROUNDS + rounds + part_rounds(rounds)


def measure(configs: dict[str, RunConfig], rounds: int, ranks: int) -> Measured:
    """Compare `moe` and `dense`, and beside them what can stand beside them."""
    ours = {name: Ours(config) for name, config in configs.items()}
    moe, config = ours["moe"], configs["moe"]
    candidates: dict[str, Candidate] = dict(ours)
    left_out = {}
    device = moe.trainer.world.device
    try:
        if ranks > 1:
            raise NotMeasured("it is measured in one process")
        candidates["transformers"] = TransformersModel(config, device)
    except NotMeasured as reason:
        left_out["transformers"] = str(reason)
    candidates[FLAT] = FlatAdamW(moe.updated, config.optimizer, moe.precision, device)
    steps = in_turn({name: candidate.step for name, candidate in candidates.items()}, rounds, WARM_UP_ROUNDS)
    parts = in_turn(
        {name: _step_in_parts(model) for name, model in ours.items()}, part_rounds(rounds), warm_up=0
    )
    found = Measured(
        moe.precision,
        moe.trainer.run.schedule.final * config.data.sequence_length,
        steps,
        parts,
        {name: candidate.parameters for name, candidate in candidates.items()},
        {name: candidate.updated for name, candidate in candidates.items()},
        left_out,
    )
    for candidate in candidates.values():
        candidate.close()
    return found


def _step_in_parts(model: Ours) -> Callable[[int], tuple[StepTime, Parts]]:
    timers = PartTimers(model.model)

    def run(number: int) -> tuple[StepTime, Parts]:
        timers.take()
        return model.step(number), timers.take()

    return run
