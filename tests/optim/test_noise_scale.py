"""The gradient noise scale: by hand, without bias, and in a run."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megamoe.optim.noise_scale import NoiseScale, estimates, part_of
from megamoe.train.loop import train
from megamoe.train.step_record import StepRecord
from tests.support.tiny import restored_process, tiny


def test_the_parts() -> None:
    assert part_of("model.decoder.layers.1.mlp.layer.router.scorer.weight") == "router"
    assert part_of("model.decoder.layers.1.mlp.layer.experts.up") == "experts"
    assert part_of("model.decoder.layers.1.mlp.layer.shared.up") == "dense"


def test_by_hand(one_rank: None) -> None:
    """Three micro batches of 2 sequences, whose gradients are thirds of (3, 0), (0, 3) and (3, 3).

    Small: (9 + 9 + 18) / 3 = 12. Big: |(2, 2)|^2 = 8. |G|^2 = (6 * 8 - 2 * 12) / 4 = 6.
    tr(S) = (12 - 8) / (1/2 - 1/6) = 12.
    """
    dense, router = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    assert dist.group.WORLD is not None
    scale = NoiseScale([("a.weight", dense), ("b.router.weight", router)], 2, 2, dist.group.WORLD)
    scale.begin(1)
    dense.sum().backward()
    assert scale.finish(StepRecord(micro_batches=1)) == {}
    scale.begin(2)
    for share in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        (dense @ torch.tensor(share) + 2 * router.sum()).backward()
    found = scale.finish(StepRecord(micro_batches=3))
    assert found["dense"] == pytest.approx(12 / 6)
    assert found["router"] == pytest.approx(0)
    scale.begin(4)
    assert scale.finish(StepRecord(micro_batches=1)) == {}  # one micro batch has nothing to compare with


def test_a_step_that_is_not_finite_leaves_the_means(one_rank: None) -> None:
    assert dist.group.WORLD is not None
    weight = nn.Parameter(torch.zeros(2))
    scale = NoiseScale([("a.weight", weight)], 1, 2, dist.group.WORLD)
    found = []
    for step, factor in enumerate((1.0, math.inf, math.nan, 1.0), 1):
        scale.begin(step)
        for share in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
            (factor * (weight @ torch.tensor(share))).backward()
        found.append(scale.finish(StepRecord(micro_batches=3)))
    assert found[1:3] == [{}, {}] and found[3] == pytest.approx(found[0])
    assert math.isfinite(found[0]["dense"])


def test_the_estimates_have_no_bias() -> None:
    torch.manual_seed(1)
    true, draws, small, count = torch.tensor([1.0, -2.0, 0.5]), 20_000, 2, 4
    noise = torch.randn(draws, count, small, 3) * torch.tensor([1.0, 3.0, 2.0])
    gradients = true + noise.mean(2)
    squares = gradients.square().sum(-1).mean(), gradients.mean(1).square().sum(-1).mean()
    signal, trace = estimates(float(squares[0]), float(squares[1]), small, small * count)
    assert signal == pytest.approx(5.25, rel=0.03) and trace == pytest.approx(14.0, rel=0.03)


def test_a_run_logs_the_steps_that_are_due(tmp_path: Path) -> None:
    options = ("log.noise_scale_every=2", "train.global_batch_size=6", f"output={tmp_path}")
    with restored_process():
        train(tiny(*options, "evaluation.batches=0"))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    keys = {f"train/noise_scale/{part}" for part in ("dense", "router", "experts")}
    for row in rows:
        found = {key for key in row if "noise_scale" in key}
        assert found == (keys if row["step"] in (2, 4) else set())
        assert all(not math.isnan(float(row[key])) for key in found)
