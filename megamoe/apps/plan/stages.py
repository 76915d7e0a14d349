"""The figures of pipeline stages: each is simulated alone, and a clock puts their passes together.

A stage is simulated in a pipeline of two or three stages, whose others have one block. What it holds and how
long its passes take does not depend on their number. How many micro batches it keeps does, by the order of
the passes (`parallel.pipeline.schedule`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megamoe.apps.plan.clock import Timeline, simulate
from megamoe.apps.plan.figures import (
    BACKWARD_VOCABULARY,
    FORWARD_VOCABULARY,
    BlockKind,
    Figures,
    block_kinds,
    combined,
    fewer_blocks,
    with_blocks,
)
from megamoe.apps.plan.memory import ACTIVATIONS
from megamoe.config import RunConfig
from megamoe.model.stage import block_ranges
from megamoe.parallel.pipeline.schedule import Pass, alive, training_order

# Phases that hold the activations of all micro batches that are alive.
HOLDING = ("step", "forward", "backward")

SimulateStage = Callable[[RunConfig, int], Figures]  # of a configuration's stage, counted from 0


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage costs in a step.

    number: from 0. chunks: the blocks of each of its chunks, counted from 0. alive: the micro batches whose
    activations it holds at most; of v chunks each counts 1 / v. figures: memory with so many of them.
    """

    number: int
    chunks: tuple[range, ...]
    alive: float
    figures: Figures

    @property
    def blocks(self) -> int:
        """Their number."""
        return sum(map(len, self.chunks))

    def seconds(self, each: Pass, is_first: bool, is_last: bool) -> float:
        """Return the time of a pass through one chunk.

        The embedding is work of the model's first part; the output layer and the loss are of its last one.
        All blocks of a stage are taken as alike.
        """
        numbers, chunks = self.figures.numbers, len(self.chunks)
        at_the_ends = numbers[FORWARD_VOCABULARY if each.forward else BACKWARD_VOCABULARY]
        rest = numbers["forward" if each.forward else "backward"] - at_the_ends
        here = (is_first and each.chunk == 0) or (is_last and each.chunk == chunks - 1)
        share = len(self.chunks[each.chunk]) / max(self.blocks, 1)
        return rest * share + (at_the_ends if here else 0.0)


@dataclass(frozen=True)
class Pipeline:
    """The stages of a step, and their passes on a clock.

    send_seconds: from the end of a pass to the beginning of the next stage's. once: seconds after the passes,
    of the stage with the longest: what of gradients and the update does not run beside them.
    """

    stages: list[Stage]
    timeline: Timeline
    send_seconds: float
    once: float

    @property
    def step_seconds(self) -> float:
        """The time of the step."""
        return self.timeline.total + self.once

    @property
    def fullest(self) -> Stage:
        """The stage that holds most."""
        return max(self.stages, key=lambda stage: stage.figures.peak_bytes)


def plan_stages(
    config: RunConfig,
    vocab_size: int,
    send_seconds: Callable[[Figures], float],
    micro_batches: int,
    whole: bool,
    simulated: SimulateStage,
) -> Pipeline:
    """Return the stages of a configuration, and the time of a step.

    send_seconds: of what a stage sends to the next one in a pass. micro_batches: of a step. whole: simulate
    all blocks of a stage. simulated: returns the figures of one stage of a smaller model for so many micro
    batches; stages alike are simulated once.
    """
    parallel, parts = config.parallel, block_ranges(config, vocab_size)
    stages, chunks = parallel.pipeline, parallel.pipeline_chunks
    all_kinds = block_kinds(config)
    known: dict[tuple[bool, bool, tuple[BlockKind, ...]], Figures] = {}
    found = []
    for number in range(stages):
        of_stage = tuple(parts[number::stages])
        own = [block for part in of_stage for block in part]
        key = (number == 0, number == stages - 1, tuple(sorted((all_kinds[block] for block in own), key=str)))
        if key not in known:
            known[key] = _figures(config, own, number == 0, number == stages - 1, whole, simulated)
        held = alive(training_order(number, stages, chunks, micro_batches)) / chunks
        # Of the simulated ones, a first or middle stage holds two micro batches, and the last one.
        extra = held - min(micro_batches, 1 if number == stages - 1 else 2)
        found.append(Stage(number, of_stage, held, holding(known[key], extra)))
    send = max(send_seconds(stage.figures) for stage in found)
    timeline = simulate(
        stages,
        chunks,
        micro_batches,
        lambda number, each: found[number].seconds(each, number == 0, number == stages - 1),
        send,
    )
    once = max(
        stage.figures.overlapped_seconds
        - micro_batches * (stage.figures.numbers["forward"] + stage.figures.numbers["backward"])
        for stage in found
    )
    return Pipeline(found, timeline, send, max(0.0, once))


def _figures(
    config: RunConfig, own: list[int], is_first: bool, is_last: bool, whole: bool, simulated: SimulateStage
) -> Figures:
    """Return the figures of a stage with these blocks, extrapolated from one or two of each kind."""
    terms = fewer_blocks(config, own)
    if whole or sum(len(blocks) for _, blocks in terms) >= len(own):
        terms = [(1, own)]
    first, last = 0, config.model.num_layers - 1
    total: list[tuple[int, Figures]] = []
    for factor, blocks in terms:
        # The other stages have one block each, which is not simulated.
        before = [] if is_first else [first]
        after = [] if is_last else [last]
        smaller = with_blocks(config, [*before, *blocks, *after])
        smaller.parallel = replace(
            smaller.parallel,
            pipeline=len(before) + 1 + len(after),
            pipeline_chunks=1,
            blocks_per_stage=[1] * len(before) + [len(blocks)] + [1] * len(after),
        )
        total.append((factor, simulated(smaller, len(before))))
    return combined(total)


def holding(figures: Figures, extra: float) -> Figures:
    """Return the figures with the activations of so many more micro batches, or fewer."""
    more = extra * figures.numbers["kept"]
    peaks = {
        (phase, name): max(0.0, size + more) if phase in HOLDING and name == ACTIVATIONS else size
        for (phase, name), size in figures.peaks.items()
    }
    return replace(figures, peaks=peaks)
