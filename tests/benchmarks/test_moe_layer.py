"""The benchmark of the MoE layer, at a size at which its times mean nothing."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

SMALL = ["--shape", "64,32,16,8,2", "--rounds", "2", "--dtypes", "fp32"]


@pytest.fixture(name="bench")
def _bench(scripts: None) -> Any:
    import moe_layer

    return moe_layer


def test_measures_all_and_writes_what_it_prints(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "ours,limit,dense,hf_eager,hf_grouped_mm"
    assert bench.main([*SMALL, "--candidates", names, "--json", str(tmp_path / "found.json")]) == 0
    data = json.loads((tmp_path / "found.json").read_text())
    (case,) = data["cases"]
    assert torch.__version__.startswith(data["versions"]["torch"])
    assert len(case["candidates"]) == 6
    lines = capsys.readouterr().out.splitlines()
    for name, found in case["candidates"].items():
        assert found["error"] < 1e-5
        assert len(found["both"]["seconds"]) == 2
        assert found["both"]["median"] > found["forward"]["median"] > 0
        assert sum(line.startswith(f"{name} ") for line in lines) == 1
    limits = [case["candidates"][f"limit_{kind}"]["both"]["over_limit"] for kind in ("grouped", "bmm")]
    assert {"median": 1.0, "low": 1.0, "high": 1.0} in limits


def spoil(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a candidate be wrong: it has another weight of one expert."""
    candidates = sys.modules["layers.catalogue"].CANDIDATES
    right = candidates[name]

    def wrong_build(shape: Any, dtype: torch.dtype, weights: Any) -> Any:
        down_EHF = weights.down_EHF.clone()
        down_EHF[3] *= 1.01
        return right.build(shape, dtype, replace(weights, down_EHF=down_EHF))

    monkeypatch.setitem(candidates, name, replace(right, build=wrong_build))


def test_another_layer_that_is_wrong_is_reported_and_left_out(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil("hf_eager", monkeypatch)
    assert bench.main([*SMALL, "--candidates", "ours,hf_eager"]) == 0
    message = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hf_eager")]
    assert len(message) == 1 and "not measured: wrong: relative error" in message[0]


def test_nothing_is_measured_where_our_layer_is_wrong(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil("ours", monkeypatch)
    assert bench.main([*SMALL, "--candidates", "ours,limit"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ours") and "wrong" in line for line in lines)
    assert not any(line.startswith("limit") for line in lines)


def test_uneven_loads_are_what_was_asked_for(bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    size = ["--shape", "512,32,16,8,2", "--rounds", "1", "--dtypes", "fp32"]
    bench.main([*size, "--uneven", "--json", str(file)])
    (case,) = json.loads(file.read_text())["cases"]
    assert case["loads"]["even"] == [1.0] * len(case["loads"]["even"])
    assert case["loads"]["uneven"] == pytest.approx([3.0] * len(case["loads"]["uneven"]), abs=0.05)


def test_memory_holds_at_least_the_gradients_of_the_weights(bench: Any) -> None:
    memory = sys.modules["layers.memory"]
    shape = bench.Shape(4096, 256, 256, 8, 1)
    found = memory.measure("limit_grouped", shape, "fp32")
    weights, rows = 4 * 8 * 3 * 256 * 256, 4 * 4096 * 256
    # Beside them at least the first product, twice as wide as a row, and at most some dozens of rows.
    assert weights + 2 * rows < found["peak"] - found["resting"] < weights + 40 * rows


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shape", "64,32,16"],
        ["--shape", "3,32,16,8,1"],
        ["--shape", "64,32,16,4,8"],
        ["--shapes", "1,9"],
        ["--dtypes", "fp8"],
        ["--candidates", "ours,theirs"],
        ["--uneven", "--candidates", "ours"],
        ["--memory", "--rounds", "3"],
        ["--json", "no/such/folder/found.json"],
    ],
)
def test_a_mistake_is_one_line(bench: Any, arguments: list[str], mistake: Callable[..., str]) -> None:
    mistake(bench.main, arguments)
