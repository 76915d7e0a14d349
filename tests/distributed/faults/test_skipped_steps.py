"""A step that is not finite, or a spike, is as if it had never been tried; too many in a row end the run."""

import gc
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.optim.optimizers import global_grad_norm
from megamoe.parallel import launch
from megamoe.parallel.zero.engine import Engine
from megamoe.train.trainer import Trainer
from tests.support.ranks.fp16 import with_fp16
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import CUT_ALL, PLAIN_FILES, ds_config, ds_variant, small_run

Found = dict[str, Any]
Case = tuple[int, dict[str, Any], str]  # ranks, layout, DeepSpeed file
RUN: dict[str, Any] = {
    "moe__router": {"scorer": "linear", "score_function": {"name": "sigmoid", "bias_update": 0.25}},
    "train__global_batch_size": 4,
}
# What breaks a step, by its number. The first has no moments yet; a sum of losses alone can be broken.
ALL: dict[int, str] = {1: "gradient", 3: "loss", 4: "both"}
FORWARD: dict[int, str] = {1: "loss", 3: "loss"}  # in fp16 a gradient's overflow also lowers the loss scale
STEPS = 5


@contextmanager
def broken(what: str | None, rank: int, place: int) -> Iterator[None]:
    """Inside, micro batch `place` of the step, on one rank, has a loss that is not finite, or a gradient."""
    forward, places = Engine.forward, iter(range(1000))

    def breaking(self: Engine, *args: Any, **inputs: Any) -> Tensor:
        losses_BS: Tensor = forward(self, *args, **inputs)
        if next(places) != place or self.world.rank != rank or what is None:
            return losses_BS
        if what == "gradient":
            losses_BS.register_hook(lambda gradient: gradient * math.inf)
            return losses_BS
        return losses_BS * math.nan if what == "both" else losses_BS + math.nan

    with mock.patch.object(Engine, "forward", breaking):
        yield


def leave_out(trainer: Trainer) -> None:
    """Go past a batch without a step."""
    size = trainer.run.schedule.size_at(trainer.progress.samples)
    batches = [next(trainer._stream) for _ in range(size // trainer.run.schedule.unit)]
    trainer.progress.step += 1
    trainer.progress.samples += size
    trainer.progress.micro_batches += len(batches) * trainer.run.plan.layout.data


def states(trainer: Trainer) -> dict[str, str]:
    """A hash of every weight, buffer, master and moment of this rank."""
    engine = trainer.engine
    with engine.gathered(engine.model.parameters()):
        found = dict(engine.model.state_dict())
        found = {name: t.clone() for name, t in found.items() if isinstance(t, Tensor)}
    for number, shard in enumerate(engine.optimizer_shards()):
        for place, parameter in enumerate(shard.tensors):
            found[f"{number}/{place}"] = parameter.detach()
            for name, value in engine.inner_optimizer.state.get(parameter, {}).items():
                found[f"{number}/{place}/{name}"] = torch.as_tensor(value)
    return {
        name: hashlib.sha256(t.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in found.items()
    }


def steps_around(breaks: dict[int, str], tried: bool, rank: int, **changes: Any) -> Found:
    """Job: STEPS steps, those of `breaks` broken in a micro batch of one rank, or not tried at all.

    changed: those at which any weight, master or moment was another afterwards.
    """
    with with_fp16():
        trainer = Trainer(small_run(**changes))
        found: Found = {"losses": [], "norms": [], "skipped": [], "changed": [], "messages": []}
        before = states(trainer) if tried else {}
        for step in range(1, STEPS + 1):
            if step in breaks and not tried:
                leave_out(trainer)
                continue
            with broken(breaks.get(step), rank, place=1):
                record, metrics = trainer.step()
            if tried:
                after = states(trainer)
                if after != before:
                    found["changed"].append(step)
                before = after
            if step in breaks:
                found["messages"].append(record.message)
            else:
                found["losses"].append(metrics["train/lm_loss"])
                found["norms"].append(metrics["train/grad_norm"])
            found["skipped"].append(metrics.get("train/skipped_steps"))
        found["states"] = states(trainer)
        trainer.release()
        del trainer
        gc.collect()  # an engine and its parameters refer to each other
    return found


def each_around(runs: list[dict[str, Any]]) -> list[tuple[Found, Found]]:
    """Job: `steps_around` of several runs in one world, the broken steps first tried and then left out."""
    try:
        return [(steps_around(tried=True, **run), steps_around(tried=False, **run)) for run in runs]
    finally:
        launch.stop()


EP2, PAIR = {"expert": 2}, {"tensor": 2, "sequence": True, "expert": 2}
# ZeRO 1 and 2 have one path, offload at both another, ZeRO 3 one for all precisions.
QUICK: list[Case] = [(2, PAIR, "zero1_bf16")]
FILES = (*PLAIN_FILES, "zero1_fp16", "zero2_fp16", "zero3_fp16")
OTHERS: list[Case] = [
    (1, {}, "zero0_fp32"),
    (1, {}, "zero1_bf16"),
    (2, PAIR, "zero0_bf16"),
    *((2, EP2, name) for name in FILES if (2, EP2, name) not in QUICK),
    *((4, {"tensor": 2, "expert": 2, "expert_tensor": 2}, f"zero{n}_bf16") for n in range(4)),
]


FULL = [pytest.param(n, OTHERS, id=f"{n} ranks, others", marks=pytest.mark.full) for n in (1, 2, 4)]


@pytest.mark.parametrize(("ranks", "of_all"), [pytest.param(2, QUICK, id="2 ranks"), *FULL])
def test_a_skipped_step_changes_nothing(pool: Pool, tmp_path: Path, ranks: int, of_all: list[Case]) -> None:
    cases = [case for case in of_all if case[0] == ranks]
    runs: list[dict[str, Any]] = []
    for number, (_, layout, name) in enumerate(cases):
        sections: dict[str, Any] = {"zero_optimization": CUT_ALL if "zero3" in name else {}}
        if "fp16" in name:
            sections["fp16"] = {"initial_scale_power": 12}
        (folder := tmp_path / str(number)).mkdir()
        parallel = {**layout, "deepspeed": ds_variant(folder, name, **sections)}
        run = {**RUN, "parallel": parallel, "train__micro_batch_size": 1}
        runs.append({"breaks": FORWARD if "fp16" in name else ALL, "rank": ranks - 1, **run})
    for answers in pool.run(each_around, runs, ranks=ranks, timeout_s=600):
        for case, arguments, (found, expected) in zip(cases, runs, answers, strict=True):
            _assert_as_if_left_out(str(case), arguments["breaks"], found, expected)


def _assert_as_if_left_out(case: str, breaks: dict[int, str], found: Found, expected: Found) -> None:
    assert found["changed"] == [step for step in range(1, STEPS + 1) if step not in breaks], case
    assert found["skipped"] == [sum(b <= step for b in breaks) for step in range(1, STEPS + 1)], case
    for what, message in zip(breaks.values(), found["messages"], strict=True):
        assert ("train/grad_norm is " if what == "gradient" else "train/lm_loss is nan") in message, case
        if what == "gradient" and "fp16" not in case:
            assert ", in the parameter groups " in message and " (rank " in message, (case, message)
    for word in ("losses", "norms", "states"):
        assert found[word] == expected[word], f"{case}: {word}"
    assert all(math.isfinite(value) for value in found["norms"]), case


def norm_with_one_broken(**changes: Any) -> float:
    """Job: the norm of a gradient that all tensor ranks hold whole, but that is broken on the last one."""
    trainer = Trainer(small_run(**changes))
    value = math.inf if trainer.world.rank == trainer.world.size - 1 else 1.0
    norm = global_grad_norm([(torch.nn.Parameter(torch.zeros(3)), torch.full((3,), value))])
    trainer.close()
    return float(norm)


def test_a_problem_of_one_rank_is_seen_by_all(pool: Pool) -> None:
    """Else one would skip the step and the others take it."""
    norms = pool.run(norm_with_one_broken, parallel__tensor=2, ranks=2)
    assert not any(map(math.isfinite, norms))


def end_of_a_run(first: int, what: str, **changes: Any) -> tuple[int, str]:
    """Job: save step 1, make steps fail from `first` on; return the last step and the message."""
    with with_fp16():
        trainer = Trainer(small_run(**changes))
        try:
            for step in range(1, STEPS + 1):
                with broken(what if step >= first else None, rank=1, place=1):
                    trainer.step()
                if step == 1:
                    trainer.save()
        except UserError as error:
            return trainer.context.step, str(error)
        finally:
            trainer.close()
    return STEPS, "went on"


def test_too_many_in_a_row_end_the_run_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    train = {"steps": 100, "micro_batch_size": 1, "max_skipped_in_a_row": 2, "global_batch_size": 8}
    ends = pool.run(end_of_a_run, 2, "both", output=tmp_path, train=train, parallel__expert=2, ranks=2)
    last = tmp_path / "small" / "checkpoints" / "step_00000001"
    reported = (
        "step 3: train/lm_loss is nan; samples 16 to 23; not finite: 19 (rank 1, micro batch 2); 2 skipped "
        "in a row (train.max_skipped_in_a_row); no weight was moved. Lower optimizer.lr or lengthen "
        f"optimizer.warmup_steps, and go on from the last good checkpoint, {last}"
    )
    assert ends == [(3, reported)] * 2


@pytest.mark.parametrize(("scale", "step"), [({"loss_scale": 64}, 3), ({"initial_scale_power": 12}, STEPS)])
def test_an_overflow_counts_where_the_loss_scale_cannot_fall(
    pool: Pool, tmp_path: Path, scale: dict[str, int], step: int
) -> None:
    path = ds_variant(tmp_path, "zero2_fp16", fp16=scale)
    run: dict[str, Any] = {"output": tmp_path, "train__max_skipped_in_a_row": 2, "parallel__deepspeed": path}
    for last, reported in pool.run(end_of_a_run, 2, "gradient", **run, ranks=2):
        expected = "step 3: train/grad_norm is inf at loss scale 64" if step == 3 else "went on"
        assert last == step and reported.startswith(expected)


SPIKES: dict[str, Any] = {
    **RUN,
    "optimizer__lr": 0.02,
    "train__loss_spike": {"sigmas": 0.1, "window": 3},
    "parallel__deepspeed": ds_config("zero1_bf16"),
}


def judged_steps(steps: int, **changes: Any) -> Found:
    """Job: the losses, how many steps were skipped, the rule's state and all weights and moments; saved."""
    trainer = Trainer(small_run(**changes))
    found: Found = {"losses": [], "skipped": [], "changed": []}
    for _ in range(steps):
        before = states(trainer)
        _, metrics = trainer.step()
        found["losses"].append(metrics["train/lm_loss"])
        found["skipped"].append(metrics.get("train/skipped_steps", 0))
        found["changed"].append(states(trainer) != before)
    trainer.save()
    found["end"] = (states(trainer), trainer.skip_policy.state())
    trainer.close()
    return found


def test_spikes_are_skipped_and_the_window_is_resumed(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(judged_steps, 10, **SPIKES, output=tmp_path / "whole", ranks=2)
    cut = {**SPIKES, "output": tmp_path / "cut", "checkpoint__resume": "auto"}
    first = pool.run(judged_steps, 6, **cut, ranks=2)
    second = pool.run(judged_steps, 4, **cut, ranks=2)
    for one, two, all_of_it in zip(first, second, whole, strict=True):
        for word in ("losses", "skipped", "changed"):
            assert one[word] + two[word] == all_of_it[word], word
        assert two["end"] == all_of_it["end"]
        # Judged by the losses of two steps before the resume and one after it.
        assert two["skipped"] == [0, 1, 1, 1] and two["changed"] == [True, False, True, True]
