"""Faults in one pipeline stage, and what a stage keeps in memory."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.errors import ExitCode
from megamoe.parallel.pipeline.schedule import Pass
from megamoe.train.step import Passes
from megamoe.train.trainer import Trainer
from tests.support.ranks.entry_script import run_entry_script
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run

THREE = ("parallel.pipeline=3", "model.num_layers=3", "train.global_batch_size=8")


def kill_the_middle_stage(trainer: Trainer) -> None:
    """In the midst of a step, before its first backward pass."""

    def die(*unused: object, **also_unused: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if trainer.progress.step == 3 and trainer.world.rank == 1:
        Passes.backward = die  # type: ignore[method-assign]


def test_a_killed_stage_is_named_in_one_line(pool: Pool, tmp_path: Path) -> None:
    """The stages around it wait for what it sends; each says which stage that is, within the time limit."""
    started = time.monotonic()
    found = run_entry_script(pool, tmp_path, *THREE, fault=kill_the_middle_stage, ranks=3)
    assert time.monotonic() - started < 60
    lost = ExitCode.UNEXPECTED  # a launcher starts the run again; after a user's mistake it would not
    assert found.codes == [lost, -signal.SIGKILL, lost], found.outputs
    lines = [line for lines in found.errors() for line in lines if line.startswith("error: ")]
    assert any("stage 1 (rank 1)" in line for line in lines), found.outputs


def test_a_mistake_that_one_stage_finds_ends_all(pool: Pool, tmp_path: Path) -> None:
    """The last norm, a vector, is on the last stage alone; the first would wait for it in its first step."""
    groups = "optimizer.groups=[{pattern: final_layernorm, algorithm: muon}]"
    two = ("parallel.pipeline=2", "model.num_layers=2", "optimizer.name=muon", groups)
    found = run_entry_script(pool, tmp_path, *two, ranks=2)
    assert found.codes == [ExitCode.MISTAKE] * 2, found.outputs
    lines = [line for line in found.errors()[0] if line.startswith("error: ")]
    assert len(lines) == 1 and "which is no matrix; narrow the pattern" in lines[0], found.outputs


def alive_micro_batches(stages: int, chunks: int, micro_batches: int) -> tuple[int, int]:
    """Job: (largest number of micro batches that this rank kept, passes that it kept at the end)."""
    largest = 0
    forward = Passes.forward

    def counted(self: Passes, each: Pass, in_flight: int | None = None) -> None:
        nonlocal largest
        forward(self, each, in_flight)
        largest = max(largest, len(self._kept))

    Passes.forward = counted  # type: ignore[method-assign]
    sizes: dict[str, Any] = {"parallel__pipeline": stages, "parallel__pipeline_chunks": chunks}
    config = small_run(model__num_layers=4, train__global_batch_size=micro_batches, **sizes)
    trainer = Trainer(config)
    trainer.step()
    trainer.release()
    return largest, trainer.world.rank


def test_stages_keep_as_many_micro_batches_as_documented(pool: Pool) -> None:
    """1F1B: stages - stage, whatever the number of micro batches."""
    for largest, rank in pool.run(alive_micro_batches, 4, 1, 8, ranks=4):
        assert largest == 4 - rank
    for largest, rank in pool.run(alive_micro_batches, 2, 2, 8, ranks=2):
        assert largest == 2 + 2 * (1 - rank) + 1  # one round through the first chunk, and the steady state


def readings_of_an_evaluation(micro_batches: int) -> list[int]:
    """Job: how many micro batches are read at a time; each reading is a collective of all stages."""
    changes: dict[str, Any] = {"parallel__pipeline": 2, "model__num_layers": 2, "train__micro_batch_size": 1}
    config = small_run(**changes, evaluation__batches=micro_batches)
    trainer, found = Trainer(config), []
    take = trainer._take

    def counted(stream: Any, count: int) -> Any:
        found.append(count)
        return take(stream, count)

    trainer._take = counted  # type: ignore[method-assign]
    trainer.evaluate()
    trainer.release()
    return found


def test_stages_do_not_wait_for_each_other_after_each_micro_batch_of_an_evaluation(pool: Pool) -> None:
    for found in pool.run(readings_of_an_evaluation, 5, ranks=2):
        assert found[0] == 8 and len(found) < sum(found) / 4, found


def skipped_step() -> list[tuple[float, bool, bool]]:
    """Job: three steps, of which the second has a NaN in a weight's gradient of the last stage."""
    config = small_run(parallel__pipeline=2, model__num_layers=4, model__tie_embeddings=False)
    trainer = Trainer(config)
    found = []
    for step in range(3):
        handles = []
        if step == 1 and trainer.world.rank == 1:
            weight = next(p for n, p in trainer.model.named_parameters() if "layers.3" in n)
            handles.append(weight.register_hook(lambda gradient: gradient * float("nan")))
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        record, _ = trainer.step()
        same = all(torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
        found.append((record.lm_loss, same, record.problem is not None))
        for handle in handles:
            handle.remove()
    trainer.release()
    return found


def test_a_step_that_is_not_finite_on_one_stage_is_skipped_on_all(pool: Pool) -> None:
    first, last = pool.run(skipped_step, ranks=2)
    assert first == last
    assert [each[1:] for each in first] == [(False, False), (True, True), (False, False)]


def long_sequence(context: int, length: int) -> tuple[list[float], float]:
    """Job: the losses of two steps of a tiny model, and the process's largest memory in GiB."""
    import resource

    config = small_run(
        data__sequence_length=length,
        data__document_aware=False,
        model__num_layers=1,
        model__num_attention_heads=4,
        moe__layers={"at": [1]},
        moe__num_shared_experts=0,
        train__global_batch_size=1,
        parallel__context=context,
        model__recompute="full",
        evaluation__batches=0,
    )
    trainer = Trainer(config)
    losses = [trainer.step()[0].lm_loss for _ in range(2)]
    trainer.release()
    return losses, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@pytest.mark.full
def test_65536_tokens_in_one_sequence_over_four_ranks(pool: Pool) -> None:
    """Within 8 GiB for each rank; and equal to one rank at 4,096 tokens."""
    for losses, memory in pool.run(long_sequence, 4, 65_536, ranks=4, timeout_s=1200):
        assert all(loss == loss for loss in losses) and memory < 8
    (alone, _), *_ = pool.run(long_sequence, 1, 4096, ranks=1)
    for losses, _ in pool.run(long_sequence, 4, 4096, ranks=4):
        assert losses == pytest.approx(alone, rel=1e-5)
