"""The speed of a step by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.metrics import names
from megamoe.model.size import ModelFlops
from megamoe.train.speed import Speed


def test_every_rollout_is_computed_and_its_sample_is_counted_once() -> None:
    """2 samples of 8 tokens, 3 rollouts of each: 48 tokens of 10 FLOPs, 96 pairs of 5; 4 s on 2 ranks."""
    record: Any = SimpleNamespace(layers={1: SimpleNamespace(load_E=torch.tensor([32, 64]))})
    speed = Speed(ModelFlops(10.0, 5.0), ranks=2, peak=1e3, length=8, counted=8, rollouts=3)
    found = speed.metrics(record, samples=2, seconds=4.0)
    assert found[names.TOKENS_PER_S] == 16 / 4
    assert found[names.GFLOPS_PER_TOKEN] == pytest.approx((480 + 480) / 16 / 1e9)
    assert found[names.TFLOPS_PER_RANK] == pytest.approx(960 / 4 / 2 / 1e12)
    assert found[names.MFU] == pytest.approx(120 / 1e3)
