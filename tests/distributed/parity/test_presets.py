"""Every run of examples/presets trains, and on 2 ranks with EP 2 as on one."""

from pathlib import Path
from typing import Any

import pytest

from megamoe import registry
from megamoe.config import load_config
from megamoe.errors import UserError
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool

ROOT = Path(__file__).resolve().parents[3]
RUNS = sorted((ROOT / "examples/presets").glob("*.yaml"))
NAMES = [path.stem for path in RUNS]
# Of the quick tests: a choice over all ranks, experts without computation, rollouts. test_parts.py has every
# part.
QUICK = ["base", "longcat_flash", "policy"]
QUICK_STEPS, FULL_STEPS = 2, 30
SHORT = ["data.sequence_length=32"]  # of the few steps
MOCK = ["data.mock=true", "data.sources=[]", "data.workers=0", "model.vocab_size=200", "evaluation.batches=0"]
# Its assignment is over the tokens of all ranks: one rank takes them as one micro batch.
TOGETHER = {"base": ["train.micro_batch_size=8"]}

# Ranks, and what lays the model out over them.
STAGED = {
    "stages": (2, ["parallel.pipeline=2"]),
    "parts of sequences": (2, ["parallel.context=2"]),
    "both": (4, ["parallel.pipeline=2", "parallel.context=2", "parallel.expert=2"]),
}
NEEDS_TOKEN_LOSSES = {"policy"}

Metrics = list[dict[str, Any]]


def train_all(names: list[str], steps: int, ranks: int, changes: list[str]) -> list[Metrics]:
    """Job: the metrics of every step of these runs."""
    found = []
    for path in RUNS:
        if path.stem not in names:
            continue
        more = TOGETHER.get(path.stem, []) if ranks == 1 else [f"parallel.expert={ranks}"]
        trainer = Trainer(load_config(path, [*MOCK, *changes, *more]))
        found.append([trainer.step()[1] for _ in range(steps)])
        trainer.release()
    return found


def both(pool: Pool, names: list[str], steps: int, changes: list[str]) -> dict[str, tuple[Metrics, Metrics]]:
    (alone,) = pool.run(train_all, names, steps, 1, changes, ranks=1, timeout_s=900)
    first, _ = pool.run(train_all, names, steps, 2, changes, ranks=2, timeout_s=900)
    return dict(zip(names, zip(alone, first, strict=True), strict=True))


def test_there_is_an_example_for_every_preset_and_four_more() -> None:
    assert set(registry.list_presets()) < set(NAMES)
    assert len(set(NAMES) - set(registry.list_presets())) == 4


@pytest.mark.parametrize("names", [QUICK, pytest.param(NAMES, marks=pytest.mark.full)], ids=["few", "all"])
def test_a_few_steps_are_the_same_on_two_ranks(pool: Pool, names: list[str]) -> None:
    """And losses and loads are logged under their parts' names."""
    for name, (alone, two) in both(pool, names, QUICK_STEPS, SHORT).items():
        for expected, found in zip(alone, two, strict=True):
            for word in ("train/lm_loss", "train/loss"):
                assert found[word] == pytest.approx(expected[word], rel=1e-4), f"{name}: {word}"
        config = load_config(ROOT / "examples/presets" / f"{name}.yaml", MOCK)
        metrics = alone[-1]
        assert {f"train/{loss}" for loss in config.moe.losses} <= metrics.keys(), name
        layers = (f"moe/layer_{number:02d}/load" for number in range(1, config.model.num_layers + 1))
        loads = [metrics[key] for key in layers if key in metrics]
        assert loads, name
        assert all(len(load) == config.moe.num_experts and sum(load) > 0 for load in loads), name


@pytest.mark.full
def test_thirty_steps(pool: Pool) -> None:
    for name, runs in both(pool, NAMES, FULL_STEPS, []).items():
        alone, two = ([step["train/lm_loss"] for step in run] for run in runs)
        for losses in (alone, two):
            assert sum(losses[-3:]) < 0.95 * sum(losses[:3]), name
        assert two[-1] == pytest.approx(alone[-1], abs=1e-3), name


def train_staged(changes: list[str]) -> list[Metrics | str]:
    """Job: the metrics of every step of every run, or why it is refused."""
    zero = f"parallel.deepspeed={ROOT / 'ds_configs/zero1_fp32.json'}"
    found: list[Metrics | str] = []
    for path in RUNS:
        try:
            trainer = Trainer(load_config(path, [*MOCK, *SHORT, zero, *changes]))
        except UserError as error:
            found.append(str(error))
            continue
        found.append([trainer.step()[1] for _ in range(QUICK_STEPS)])
        trainer.release()
    return found


@pytest.mark.full
@pytest.mark.parametrize("layout", STAGED)
def test_with_stages_and_parts_of_sequences(pool: Pool, layout: str) -> None:
    ranks, changes = STAGED[layout]
    (alone,) = pool.run(train_staged, [], ranks=1, timeout_s=900)
    first, *_ = pool.run(train_staged, changes, ranks=ranks, timeout_s=900)
    for name, expected, found in zip(NAMES, alone, first, strict=True):
        if name in NEEDS_TOKEN_LOSSES:
            assert "needs the loss of each token" in found
            continue
        assert not isinstance(found, str), f"{name}: {found}"
        for one, other in zip(expected, found, strict=True):
            for word in ("train/lm_loss", "train/loss", "train/grad_norm"):
                assert other[word] == pytest.approx(one[word], rel=1e-4), f"{name}: {word}"
