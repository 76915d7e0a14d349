"""The coordinate check: sizes by width, activations, slopes."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.width.coordinates import (
    FLAT,
    MUP,
    STANDARD,
    _Watch,
    exponent,
    exponents,
    means,
    measure,
    width_overrides,
)
from megamoe.config import dump_yaml, load_config
from megamoe.errors import UserError
from tests.support.tiny import BASE, ROOT, restored_process, tiny, tiny_model, tool

Refused = Callable[..., str]


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(dump_yaml(tiny("model.head_size=8")))
    return path


def test_sizes_grow_with_the_width() -> None:
    config = load_config(ROOT / "examples/demo.yaml", ["moe.num_shared_experts=1", "moe.latent_size=64"])
    grown = load_config(None, list(width_overrides(config, 512, 128, MUP)))
    assert grown.model.hidden_size == 512 and grown.model.num_attention_heads == 8
    assert grown.model.ffn_hidden_size == 1024 and grown.moe.expert_ffn_hidden_size == 512
    assert grown.moe.latent_size == 64 * 512 // config.model.hidden_size
    assert grown.model.mup is not None and grown.model.mup.base == 128
    assert load_config(None, list(width_overrides(config, 512, 128, STANDARD))).model.mup is None


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            (),
            r"--widths: 20 makes model\.ffn_hidden_size 24 of hidden size 16 30, .*|.*num_attention_heads.*",
        ),
        (
            ("moe.groups=[{layers: [1], expert_ffn_hidden_size: 6}]",),
            r"moe\.groups: has FFN or latent sizes of its own, which do not grow with the width; leave .*",
        ),
    ],
)
def test_a_width_that_does_not_divide_is_refused(overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError) as refused:
        width_overrides(tiny(*overrides), 20, 20, MUP)
    assert re.fullmatch(line, str(refused.value)), str(refused.value)


@pytest.mark.parametrize("power", [-1.0, 0.0, 0.5, 2.0])
def test_the_exponent_of_a_power_is_that_power(power: float) -> None:
    assert exponent({width: 3 * width**power for width in (16, 32, 128)}) == pytest.approx(power, abs=1e-9)


def test_sizes_are_means_over_the_seeds() -> None:
    found = means([{"logits": [(1.0, 0.0), (2.0, 3.0)]}, {"logits": [(3.0, 0.0), (6.0, 5.0)]}])
    assert found == {"logits": [(2.0, 0.0), (4.0, 4.0)]}
    assert exponents({16: found["logits"], 32: [(1.0, 0.0), (8.0, 16.0)]}) == pytest.approx((1.0, 2.0, 2.0))


@pytest.mark.parametrize("wrong", [-0.5, 0.0, 0.5])
@pytest.mark.parametrize("widths", [(64, 256), (16, 64, 256), (64, 128, 256, 512)])
def test_terms_that_fall_off_are_flat_and_wrong_powers_are_not(widths: tuple[int, ...], wrong: float) -> None:
    """The limit of a router's change as measured, 0.0475, and its terms of width^-1/2, 0.41 in all."""
    change = {width: math.hypot(0.0475, 0.41 * width**-0.5) * width**wrong for width in widths}
    _, _, wider = exponents({width: [(1.0, found)] for width, found in change.items()})
    assert (abs(wider) <= FLAT) == (wrong == 0)


def test_activations_are_those_of_the_modules(one_rank: None) -> None:
    """Of the block, the embedding and the router's scores; the change is that since the first pass."""
    model: Any = tiny_model(tiny("moe.layers={at: [2]}"))
    watch, tokens, positions = _Watch(model), torch.arange(8)[None], torch.arange(8)[None]
    with watch:
        model.whole_logits(tokens, positions)
    assert {change for _, change in watch.sizes().values()} == {0.0}
    words = model.model.embedding.word_embeddings.weight
    size = words.detach()[:8].square().mean().sqrt()
    assert watch.sizes()["embedding"][0] == pytest.approx(float(size))
    words.data += 0.5
    with watch:
        model.whole_logits(tokens, positions)
    found = watch.sizes()
    assert found["embedding"][1] == pytest.approx(0.5)
    assert set(found) == {"embedding", "attention", "router scores", "FFN or experts", "block", "logits"}


def test_runs_are_measured_and_leave_nothing(tiny_file: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    with restored_process():
        found = measure(str(tiny_file), 2, 1, ("optimizer.lr=0.01",))
    assert all(len(steps) == 3 and steps[0][1] == 0 < steps[2][1] for steps in found.values())
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--widths", "16", "24"], "--widths: 24 is no multiple of the narrowest, 16"),
        (["--widths", "16"], "--widths: found [16], expected two or more different sizes"),
        (["--steps", "0"], "--steps: found 0, expected at least 1"),
    ],
)
def test_bad_options(refused: Refused, tiny_file: Path, arguments: list[str], line: str) -> None:
    output = tiny_file.parent / "x.png"
    assert line in refused("coordinate_check", "--config", tiny_file, "--output", output, *arguments)


@pytest.mark.full
def test_the_check_from_end_to_end(tiny_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """muP is flat over three widths, and the standard parametrisation is not."""
    output = tiny_file.parent / "check.png"
    common = ["--config", str(tiny_file), "--output", str(output)]
    common += ["--widths", "32", "128", "512"]
    given = [override for override in BASE if override.startswith("data.")]
    rate = ["optimizer.lr=0.01", "data.sequence_length=32", *given[2:]]
    with restored_process():
        assert tool("coordinate_check").main([*common, "--steps", "3", *rate]) == 0
    printed = capfd.readouterr().out
    assert not re.search(r"^muP, (block|logits|router).*NOT flat", printed, re.M), printed
    assert re.search(r"^standard, block.*NOT flat", printed, re.M), printed
    assert output.read_bytes().startswith(b"\x89PNG")
    assert set(json.loads(output.with_suffix(".json").read_text())) == {MUP, STANDARD}
