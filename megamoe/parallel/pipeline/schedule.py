"""The order of the passes of each pipeline stage, as data.

A model is cut into pipeline x chunks parts; part c * pipeline + s is chunk c of stage s. A pass computes one
part for one micro batch, forward or backward.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """One pass of a stage: forward or backward, of a micro batch, through one of the stage's chunks."""

    forward: bool
    micro_batch: int
    chunk: int = 0


def training_order(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Pass]:
    """Return the passes of a stage in their order: 1F1B, or with several chunks interleaved 1F1B.

    1F1B (Narayanan et al. 2019, PipeDream-Flush): a stage begins with as many forward passes as there are
    stages after it, and then alternates, so at most stages - stage micro batches are alive. Interleaved
    (Narayanan et al. 2021, section 2.2): a stage takes the micro batches in rounds through its chunks. Both
    work with any number of micro batches; interleaved needs one that divides into equal rounds, see
    `rounds_problem`.

    Raises:
        ValueError: if the micro batches do not divide so.
    """
    if problem := rounds_problem(stages, chunks, micro_batches):
        raise ValueError(problem)
    if chunks == 1:
        warmup = min(stages - stage - 1, micro_batches)
        order = [Pass(True, place) for place in range(warmup)]
        for place in range(micro_batches - warmup):
            order += [Pass(True, warmup + place), Pass(False, place)]
        return order + [Pass(False, place) for place in range(micro_batches - warmup, micro_batches)]
    per_round = micro_batches // _rounds(stages, micro_batches)
    total = micro_batches * chunks
    warmup = min((chunks - 1) * per_round + 2 * (stages - 1 - stage), total)
    forward = [_in_rounds(True, number, per_round, chunks) for number in range(total)]
    backward = [_in_rounds(False, number, per_round, chunks) for number in range(total)]
    order = forward[:warmup]
    for place in range(total - warmup):
        order += [forward[warmup + place], backward[place]]
    return order + backward[total - warmup :]


def alive(order: list[Pass]) -> int:
    """Return the largest number of forward passes whose backward pass is still to come."""
    largest = now = 0
    for each in order:
        now += 1 if each.forward else -1
        largest = max(largest, now)
    return largest


def rounds_problem(stages: int, chunks: int, micro_batches: int) -> str | None:
    """Return why interleaved 1F1B cannot divide the micro batches, as the end of a sentence, or None."""
    rounds = _rounds(stages, micro_batches)
    if chunks == 1 or micro_batches % rounds == 0:
        return None
    return (
        f"{micro_batches} micro batches do not divide into {rounds} equal rounds over {stages} stages; "
        f"choose a multiple of {stages}, or fewer than {2 * stages}"
    )


def _rounds(stages: int, micro_batches: int) -> int:
    """Return the number of rounds of at least as many micro batches as there are stages, at least one."""
    return max(1, micro_batches // stages)


def _in_rounds(forward: bool, number: int, per_round: int, chunks: int) -> Pass:
    """Return a stage's pass `number` forward, or backward: there the last chunk comes first."""
    round_, within = divmod(number, per_round * chunks)
    chunk, place = divmod(within, per_round)
    return Pass(forward, round_ * per_round + place, chunk if forward else chunks - 1 - chunk)
