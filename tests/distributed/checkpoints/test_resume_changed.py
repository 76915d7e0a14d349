"""Resuming with something changed: what would lose or mistake state is refused, the rest trains on."""

import math
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megamoe import registry
from megamoe.errors import UserError
from megamoe.moe.part import Dims, Part
from megamoe.moe.scorers.linear import LinearScorer
from megamoe.parallel import launch
from megamoe.train import saver
from megamoe.train.trainer import Trainer
from tests.support.checkpoint_files import Tensors, rewrite
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import assert_same_experts, ds_config, run_steps, small_run

Changes = dict[str, Any]


class Learned(Part):
    """A loss with a parameter."""

    @dataclass
    class Config:
        weight: float = 0.1

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.vector = nn.Parameter(torch.ones(dims.num_experts))

    def forward(self, routing: Any, context: Any) -> Tensor:
        return (self.vector * routing.probs_TE.mean(0)).sum()


class Negated(LinearScorer):
    """A scorer whose tensors are those of another, with another meaning."""

    def forward(self, hidden_TH: Tensor, context: Any) -> Tensor:
        scores_TE = super().forward(hidden_TH, context)
        assert isinstance(scores_TE, Tensor)
        return -scores_TE


def router(**stages: Any) -> Changes:
    return {"moe__router": stages, "moe__losses": {}}


def two_losses(*names: str) -> Changes:
    return {**router(), "moe__losses": {name: {"name": "learned"} for name in names}}


NOISY = router(scorer={"name": "noisy", "start": "normal"})
SIGMOID = router(score_function="sigmoid")
BIASED = router(score_function={"name": "sigmoid", "bias_update": 0.01})
LEAVE = {"checkpoint__allow_changes": True}
TABLE = router(scorer="hash", selector="table")
FUNCTION = "moe.router.score_function"
# (saved with, resumed with, what the user is told of it; None: it trains on)
CASES: dict[str, tuple[Changes, Changes, str | None]] = {
    "fewer parameters": (NOISY, router(), "moe.router.scorer noisy, this run has linear"),
    "more parameters": (router(), NOISY, "moe.router.scorer linear, this run has noisy"),
    "tensors of the same names": (router(), router(scorer="negated"), "scorer linear, this run has negated"),
    "another size": (
        router(scorer={"name": "cosine", "routing_dim": 4}),
        router(scorer={"name": "cosine", "routing_dim": 6}),
        "moe.router.scorer.routing_dim 4, this run has 6",
    ),
    "a bias that vanishes": (BIASED, SIGMOID, f"{FUNCTION}.bias_update 0.01, this run has 0.0"),
    "a bias that begins": (SIGMOID, BIASED, f"{FUNCTION}.bias_update 0.0, this run has 0.01"),
    "a score function without the bias": (BIASED, router(), f"{FUNCTION} sigmoid, this run has softmax"),
    "another table": (
        TABLE,
        router(scorer="hash", selector={"name": "table", "k": 2}),
        "moe.router.scorer.table_KV [1, 64], this run has [2, 64]",
    ),
    "a loss that has learned": (two_losses("a"), two_losses(), "moe.losses.a {"),
    "a loss that would have to": (two_losses(), two_losses("a"), "moe.losses.a None, this run has {"),
    "another order": (two_losses("a", "b"), two_losses("b", "a"), None),
    "what keeps no state": (
        {**router(scorer={"name": "linear", "jitter": 0.1}), "moe__losses": {"switch_balance": 0.1}},
        {
            **router(
                score_function={"name": "softmax", "temperature": 2.0},
                selector={"name": "top_k", "k": 3},
                capacity={"name": "per_expert", "factor": 1.5},
            ),
            "moe__losses": {"z_loss": 0.2},
            "optimizer__lr": 1e-2,
            **LEAVE,
        },
        None,
    ),
    "a bias of another speed": (
        BIASED,
        router(score_function={"name": "sigmoid", "bias_update": 0.5, "bias_until": 9, "temperature": 2.0})
        | LEAVE,
        None,
    ),
}


def save_all(folder: Path) -> None:
    """Job: a checkpoint of each case after a step."""
    try:
        for place, (before, _, _) in enumerate(_cases()):
            _save(folder / str(place), before)
    finally:
        launch.stop()


def resume_all(folder: Path, unchecked: bool) -> list[str]:
    """Job: return the message of each resume; `unchecked`: only the tensors are checked."""
    check = mock.patch.object(saver, "check_resume") if unchecked else nullcontext()
    try:
        with check:
            return [_resume(folder / str(n), after, str(n)) for n, (_, after, _) in enumerate(_cases())]
    finally:
        launch.stop()


def _cases() -> list[tuple[Changes, Changes, str | None]]:
    registry._parts["loss"]["learned"] = Learned
    registry._parts["scorer"]["negated"] = Negated
    return list(CASES.values())


def _save(output: Path, changes: Changes) -> None:
    trainer = Trainer(small_run(output, **changes))
    trainer.step()
    trainer.save()
    trainer.release()


def _resume(output: Path, changes: Changes, place: str) -> str:
    path = output / "small" / "checkpoints" / "step_00000001"
    try:
        trainer = Trainer(small_run(output / "again", checkpoint__resume=str(path), **changes))
    except UserError as error:
        return str(error)
    _, metrics = trainer.step()
    trainer.release()
    assert math.isfinite(metrics["train/loss"])
    return "trains"


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("changed")
    pool.run(save_all, folder, ranks=1)
    return folder


def test_a_part_whose_state_would_be_lost_is_named(pool: Pool, saved: Path) -> None:
    (found,) = pool.run(resume_all, saved, False, ranks=1)
    for (name, (_, _, reported)), message in zip(CASES.items(), found, strict=True):
        assert reported is not None or message == "trains", f"{name}: {message}"
        assert reported is None or ("saved with " in message and reported in message), f"{name}: {message}"
        assert "\n" not in message


def test_what_is_loaded_is_refused_by_itself(pool: Pool, saved: Path) -> None:
    """Whatever the comparison before may overlook; but not what has the same names and shapes."""
    (found,) = pool.run(resume_all, saved, True, ranks=1)
    reported = dict(zip(CASES, found, strict=True))
    assert "this model has no place for" in reported["fewer parameters"]
    bias = "model.decoder.layers.1.mlp.layer.router.score_function.bias"
    assert f"this model has no place for {bias}" in reported["a bias that vanishes"]
    assert "layer.router.score_function.bias is missing" in reported["a bias that begins"]
    assert "scorer.weight has shape [4, 32], this model needs [6, 32]" in reported["another size"]
    for name, (_, _, wanted) in CASES.items():
        overlooked = name == "tensors of the same names"
        assert (reported[name] == "trains") == (wanted is None or overlooked), f"{name}: {reported[name]}"


def save_and_resume(folder: Path, **changes: Any) -> list[str]:
    """Job: return the message for each way to damage a tensor of a checkpoint, with valid checksums."""
    path = folder / "small" / "checkpoints" / "step_00000001"
    try:
        _save(folder, changes)
        whole = folder / "whole"
        shutil.copytree(path, whole)
        reported = []
        for name, spoil in SPOILT:
            shutil.rmtree(path)
            shutil.copytree(whole, path)
            rewrite(path, partial(spoil, name=name))
            reported.append(_resume(folder, changes, "again"))
        return reported
    finally:
        launch.stop()


def _lose(tensors: Tensors, name: str) -> None:
    del tensors[name]


def _double(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.cat([tensors[name], tensors[name]])


def _add(tensors: Tensors, name: str) -> None:
    tensors[name] = torch.zeros(1)


NORM = "model.decoder.final_layernorm.weight"
EXPERTS = "model.decoder.layers.1.mlp.layer.experts.up"
SPOILT = [
    ("model/other", _add),
    *((f"{kind}/{name}", _lose) for kind in ("model", "exp_avg_sq") for name in (NORM, EXPERTS)),
    *((f"{kind}/{name}", _double) for kind in ("model", "exp_avg") for name in (NORM, EXPERTS)),
    ("random/00000/torch", _lose),
    ("random/00000/numpy", _double),
]


@pytest.mark.parametrize("config", ["zero0_fp32", "zero2_bf16"])
def test_no_tensor_too_many_too_few_or_of_another_shape(pool: Pool, tmp_path: Path, config: str) -> None:
    (found,) = pool.run(save_and_resume, tmp_path, parallel__deepspeed=ds_config(config), ranks=1)
    for (name, spoil), reported in zip(SPOILT, found, strict=True):
        what = name.removeprefix("model/")
        if name.startswith("random"):
            assert "the random states of rank 0 are damaged" in reported
        elif spoil is _add:
            assert f"this model has no place for {what}; use the configuration that saved it" in reported
        elif spoil is _lose:
            assert f"{what} is missing; the checkpoint is of another model" in reported
        else:
            assert f"{what} has shape " in reported and "this model needs " in reported
        assert "\n" not in reported


HOME: Changes = {
    "moe__router": {"masks": [{"name": "gating_dropout", "rate": 1.0, "ranks": 2}]},
    "moe__losses": {},
    "checkpoint__resume": "auto",
}
RECUT: Changes = {"train__micro_batch_size": 2, "train__global_batch_size": 8}


@pytest.mark.full
def test_a_tokens_rank_is_right_after_the_batch_size_changed(pool: Pool, tmp_path: Path) -> None:
    """One rank gives the same result. 6 samples are no multiple of the 4 of two micro batches."""
    two = {**HOME, "output": tmp_path / "two", "parallel__expert": 2}
    one = {**HOME, "output": tmp_path / "one"}
    pool.run(run_steps, 1, True, **two, train__global_batch_size=6, ranks=2)
    pool.run(run_steps, 1, True, **one, train__global_batch_size=6, ranks=1)
    ranks = pool.run(run_steps, 2, True, **two, **RECUT, ranks=2)
    (alone,) = pool.run(run_steps, 2, **one, **RECUT, ranks=1)
    for rank, found in enumerate(ranks):
        assert found["samples"][0] == [[6 + 2 * rank, 7 + 2 * rank], [10 + 2 * rank, 11 + 2 * rank]]
        for chosen in found["chosen"]:
            assert set((chosen[:, 3] // 4).tolist()) == {rank}
        assert found["lm_loss"] == pytest.approx(alone["lm_loss"], rel=1e-5)
    assert_same_experts(ranks, alone)
    # Resumed once more as it was, it goes on as it would have.
    path = tmp_path / "two" / "small" / "checkpoints" / "step_00000001"
    whole = pool.run(run_steps, 3, **{**two, **RECUT, "checkpoint__resume": str(path)}, ranks=2)
    again = pool.run(run_steps, 1, **two, **RECUT, ranks=2)
    assert again[0]["loss"] == whole[0]["loss"][2:]


def test_the_count_of_micro_batches_is_that_of_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """Three steps of one rank, with `ranks: 4`; the resume continues with the fourth micro batch."""
    four = {"moe__router": {"masks": [{"name": "gating_dropout", "rate": 1.0, "ranks": 4}]}}
    run = {**HOME, **four, "train__global_batch_size": 3, "output": tmp_path}
    homes = []
    for _ in range(2):
        (found,) = pool.run(run_steps, 1, True, **run, ranks=1)
        sample_N, expert_N = found["chosen"][0][:, 1] // 32, found["chosen"][0][:, 3]
        homes += [set((expert_N[sample_N == n] // 2).tolist()) for n in sample_N.unique()]
    assert homes == [{0}, {1}, {2}, {3}, {0}, {1}]
