"""Two micro batches in flight train as one after the other: weights, metrics and records, bit for bit.

At ZeRO 2 the gradients of both are summed before they are reduced over the ranks, so there to 1e-6.
"""

import gc
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.config import RunConfig, load_config
from megamoe.train.trainer import Trainer
from tests.distributed.parity.test_models import OTHERS, SIZES, with_ragged_pairs
from tests.distributed.parity.test_presets import MOCK, RUNS, SHORT, TOGETHER
from tests.support.ranks.matrix import SYSTEMS
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config, small_run

STEPS = 2
OF_TIME = ("time", "perf/")  # what begins so is different in every run
ENCODERS = {name: {**SIZES, **changes} for name, changes in OTHERS.items()}
DIRECT: dict[str, Any] = {"parallel__expert": 2}
BY_NODE = {"parallel__exchange": "by_node", "parallel__node_size": 1}


@dataclass(frozen=True)
class Case:
    """A run and its ranks. sequences: of a step. bits: equal to the bit; if not, within `close`."""

    changes: dict[str, Any]
    ranks: int = 2
    sequences: int = 8
    zero: str = "zero0_fp32"
    bits: bool = True
    close: float = 1e-6

    def run(self) -> dict[str, Any]:
        return {
            "train__global_batch_size": self.sequences,
            "parallel__deepspeed": ds_config(self.zero),
            **self.changes,
        }


TENSOR = {"parallel__tensor": 2, "parallel__sequence": True, "parallel__expert": 2}
WIDE = {"model__num_attention_heads": 4, "moe__num_experts": 16, "train__micro_batch_size": 2}
FOUR = {"parallel__tensor": 2, "parallel__expert": 4, "parallel__node_size": 2}
MANY = {"model__multi_token_prediction": {"depth": 2}, "model__hidden_dropout": 0.0}
QUICK = {
    "bf16": Case({**DIRECT, **WIDE, **SYSTEMS["moec"], **BY_NODE}, zero="zero1_bf16", sequences=16),
    "zero 2": Case(DIRECT, zero="zero2_fp32", bits=False),
    "recomputed": Case({**ENCODERS["encoder_decoder"], **DIRECT, "model__recompute": "full"}),
}
FULL = {
    "odd": Case(DIRECT, sequences=6),
    "tensor": Case({**WIDE, **TENSOR, **MANY, "model__recompute": ["norms", "moe"]}, sequences=4),
    "one rank": Case({}, ranks=1),
    "fp8 exchange": Case({**DIRECT, "parallel__exchange_dtype": "fp8"}),
    "threshold": Case({**DIRECT, **WIDE, **SYSTEMS["threshold"]}, sequences=16),
    "encoder": Case({**ENCODERS["encoder"], **DIRECT}),
    "no exchange": Case({}, zero="zero1_fp32"),
    "zero 1": Case({**DIRECT, **MANY}, zero="zero1_fp32", sequences=14),
    # ZeRO 2 reduces the sum of both micro batches once, in bf16.
    "zero 2 in bf16": Case(DIRECT, zero="zero2_bf16", bits=False, close=2**-7, sequences=4),
    "selective": Case({**DIRECT, "model__recompute": "selective"}),
    "untied": Case({**DIRECT, "model__tie_embeddings": False}),
    "full": Case({**DIRECT, "model__recompute": "full"}),
    "running balance": Case(
        {
            **DIRECT,
            "moe__losses": {"switch_balance": {"weight": 0.1, "scope": "global_batch", "running": True}},
        }
    ),
}
OF_FOUR = {
    "2 nodes": Case({**WIDE, **FOUR, **SYSTEMS["top_2"], "parallel__exchange": "by_node"}, ranks=4),
    "slices": Case({**WIDE, "parallel__tensor": 2, "parallel__expert": 2, "parallel__expert_tensor": 2}, 4),
    "4 experts' ranks": Case({"parallel__expert": 4, **MANY}, ranks=4, zero="zero1_fp32"),
    "copies": Case({"parallel__expert": 2, "model__recompute": "full"}, ranks=4, sequences=16),
}


@dataclass
class Found:
    """What a rank found. metrics: of each step."""

    weights: dict[str, Tensor]
    metrics: list[dict[str, Any]]


def found_in(config: RunConfig, steps: int) -> Found:
    """Train some steps, and return what came of it."""
    trainer = Trainer(config)
    metrics = [trainer.step()[1] for _ in range(steps)]
    weights = {name: each.detach().clone() for name, each in trainer.engine.model.named_parameters()}
    trainer._stream.close()
    trainer.saver.checkpoints.close()
    del trainer
    gc.collect()
    return Found(weights, metrics)


def trained_both_ways(several: list[dict[str, Any]]) -> list[tuple[Found, Found]]:
    """Job: of each run, what this rank finds one after the other, and in flight."""
    with_ragged_pairs()
    return [
        tuple(found_in(small_run(**run, train__in_flight=number), STEPS) for number in (1, 2))  # type: ignore[misc]
        for run in several
    ]


def presets_both_ways() -> list[tuple[Found, Found]]:
    """Job: the same of every run of examples/presets."""
    found = []
    for path in RUNS:
        changes = [*MOCK, *SHORT, *TOGETHER.get(path.stem, []), "parallel.expert=2"]
        config = load_config(path, changes)
        config.train.global_batch_size = 4 * config.train.micro_batch_size
        in_flight = replace(config, train=replace(config.train, in_flight=2))
        found.append((found_in(config, STEPS), found_in(in_flight, STEPS)))
    return found


def assert_equal(one: Found, two: Found, bits: bool, close: float = 1e-6) -> None:
    for name, weight in one.weights.items():
        if bits:
            assert torch.equal(weight, two.weights[name]), name
        else:
            torch.testing.assert_close(two.weights[name], weight, rtol=close, atol=close, msg=name)
    steps = None if close < 1e-3 else 1  # later ones choose other experts
    for before, after in zip(one.metrics[:steps], two.metrics[:steps], strict=True):
        assert before.keys() == after.keys()
        for name, value in before.items():
            if not name.startswith(OF_TIME):
                expected = value if bits else pytest.approx(value, rel=close)
                assert after[name] == expected, name


def check(pool: Pool, cases: dict[str, Case], ranks: int) -> None:
    of_ranks = {name: case for name, case in cases.items() if case.ranks == ranks}
    runs = [case.run() for case in of_ranks.values()]
    for of_rank in pool.run(trained_both_ways, runs, ranks=ranks, timeout_s=600):
        for case, (one, two) in zip(of_ranks.values(), of_rank, strict=True):
            assert_equal(one, two, case.bits, case.close)


def test_two_ranks(pool: Pool) -> None:
    check(pool, QUICK, 2)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_many_layouts(pool: Pool, ranks: int) -> None:
    check(pool, {**FULL, **OF_FOUR}, ranks)


@pytest.mark.full
def test_every_preset(pool: Pool) -> None:
    for of_rank in pool.run(presets_both_ways, ranks=2, timeout_s=900):
        for path, (one, two) in zip(RUNS, of_rank, strict=True):
            assert_equal(one, two, bits=True)
            assert path
