"""A run that was stopped and resumed goes on bit for bit as if it had not been: with dropout, jitter, a
growing batch, a moving learning rate and, in one run of a kind, data read ahead by a loader process."""

import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.checkpoint_files import assert_same_bits, read_tensors
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import PLAIN_FILES, ds_config, ds_file, run_each, run_steps

STOP, STEPS = 2, 4
RUN: dict[str, Any] = {
    "model__hidden_dropout": 0.1,
    "train__steps": STEPS,
    "train__batch_rampup": {"start": 2, "increment": 2, "samples": 10},
    "optimizer__schedule": "cosine",
    "optimizer__warmup_steps": 2,
}
OPTIMIZER = ("exp_avg/", "exp_avg_sq/", "step/")
# ZeRO 1 and 2 have one path, which the test of tensor parallelism takes. Offload on the CPU has none of its
# own; nor has fp32 beside bf16.
QUICK = ("zero0_bf16", "zero3_bf16")


@pytest.mark.parametrize(
    ("ranks", "files"),
    [
        # tests/train/test_loop.py resumes a run of one rank.
        pytest.param(1, ("zero0_fp32",), id="1 rank", marks=pytest.mark.full),
        pytest.param(2, QUICK, id="2 ranks"),
        pytest.param(
            2, tuple(file for file in PLAIN_FILES if file not in QUICK), id="others", marks=pytest.mark.full
        ),
    ],
)
def test_a_resumed_run_is_bit_identical(pool: Pool, tmp_path: Path, ranks: int, files: Any) -> None:
    layouts: dict[str, dict[str, Any]] = {}
    for file in files:
        layout = {"parallel__expert": ranks, "parallel__deepspeed": ds_file(tmp_path, file)}
        layouts[file] = {**RUN, **layout, "save": True, "data__workers": int(file == files[0])}
    auto = {"checkpoint__resume": "auto"}
    several = [
        [{**run, **more, "steps": steps, "output": tmp_path / file / kind} for file, run in layouts.items()]
        for kind, steps, more in (("whole", STEPS, {}), ("cut", STOP, auto), ("cut", STEPS - STOP, auto))
    ]
    # By what was run: by rank: by file.
    whole, first, second = (pool.run(run_each, runs, ranks=ranks, timeout_s=600) for runs in several)
    for place, file in enumerate(files):
        for rank in range(ranks):
            one, two, all_steps = first[rank][place], second[rank][place], whole[rank][place]
            for word in ("lm_loss", "loss", "grad_norm", "lr", "batch_size", "masks", "samples"):
                assert one[word] + two[word] == all_steps[word], f"{file}: {word}"
        sizes = whole[0][place]["batch_size"]
        assert len(set(sizes)) > 2  # it grew, and was growing at the stop
        assert sizes[STOP - 1] < sizes[-1]
        _assert_same_state(tmp_path / file / "whole", tmp_path / file / "cut", ranks)


CUT_LAYOUTS = [
    (2, {"tensor": 2, "sequence": True, "expert": 2, "deepspeed": ds_config("zero1_fp32")}),
    (4, {"tensor": 2, "expert": 2, "expert_tensor": 2, "deepspeed": ds_config("zero2_bf16")}),
]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "layout"), CUT_LAYOUTS)
def test_a_resume_is_bit_identical_under_tensor_parallelism(
    pool: Pool, tmp_path: Path, ranks: int, layout: dict[str, Any]
) -> None:
    """Tensor-parallel activations have a separate dropout on each rank; replicated ones have the same."""
    run = {**RUN, "parallel": layout, "model__attention_dropout": 0.1}
    whole = pool.run(run_steps, STEPS, True, output=tmp_path / "whole", **run, ranks=ranks)
    cut = {**run, "output": tmp_path / "cut", "checkpoint__resume": "auto"}
    first = pool.run(run_steps, STOP, True, **cut, ranks=ranks)
    second = pool.run(run_steps, STEPS - STOP, True, **cut, ranks=ranks)
    for rank in range(ranks):
        for word in ("lm_loss", "loss", "grad_norm"):
            assert first[rank][word] + second[rank][word] == whole[rank][word], word
            assert whole[rank][word] == whole[0][word]
    _assert_same_state(tmp_path / "whole", tmp_path / "cut", ranks)


def _assert_same_state(one: Path, other: Path, ranks: int) -> None:
    """Weights, optimiser and random states at the end: equal in every bit, and all of them there."""
    folder = Path("small", "checkpoints", f"step_{STEPS:08d}")
    tensors = read_tensors(one / folder)
    assert_same_bits(tensors, read_tensors(other / folder))
    assert len(list((one / folder).glob("shard_*"))) == ranks
    weights = [name.removeprefix("model/") for name in tensors if name.startswith("model/")]
    kinds = {kind: {n.removeprefix(kind) for n in tensors if n.startswith(kind)} for kind in OPTIMIZER}
    assert len(weights) == len(kinds["step/"]) > 10  # this model has no buffers
    assert all(names == set(weights) for names in kinds.values())
    assert {name.split("/")[1] for name in tensors if name.startswith("random/")} == {
        f"{rank:05d}" for rank in range(ranks)
    }


def run_without_pickle(**changes: Any) -> dict[str, list[Any]]:
    """Job: one step of a resumed run in which whoever unpickles a file fails."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("unpickled")

    with mock.patch.object(torch, "load", refuse), mock.patch.object(pickle, "load", refuse):
        return run_steps(1, **changes)


def test_nothing_is_unpickled(pool: Pool, tmp_path: Path) -> None:
    pool.run(run_steps, 1, True, output=tmp_path, ranks=1)
    files = [path.suffix for path in (tmp_path / "small" / "checkpoints" / "step_00000001").glob("*.*")]
    assert set(files) == {".json", ".safetensors"}
    (found,) = pool.run(run_without_pickle, output=tmp_path, checkpoint__resume="auto", ranks=1)
    assert found["samples"][0][0] == [8]
