"""The benchmark of whole steps, at a size at which its times mean nothing."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny import BASE, restored_process, tiny


@pytest.fixture(name="bench")
def _bench(scripts: None) -> Iterator[Any]:
    import train_step

    with restored_process():
        yield train_step


@pytest.fixture(name="config")
def _config(tmp_path: Path) -> str:
    path = tmp_path / "empty.yaml"
    path.write_text("name: tiny\n")
    return str(path)


def overrides(*more: str) -> list[str]:
    return [entry for entry in (*BASE, *more) if not entry.startswith("train.steps=")]


def measured(bench: Any, moe: list[float], dense: list[float], flat: list[float]) -> Any:
    """Simulated timers: in each second one step is all forward pass and one is all update."""
    candidate = sys.modules["steps.candidate"]

    def steps(times: list[float]) -> list[Any]:
        return [
            candidate.StepTime(0.0, seconds / 2, seconds / 2, seconds, seconds, 3 * seconds)
            for seconds in times
        ]

    names = {"moe": moe, "dense": dense, "transformers": dense, "flat AdamW": flat}
    numbers = dict.fromkeys(names, 1)
    found = {name: steps(times) for name, times in names.items()}
    return sys.modules["steps.measure"].Measured("fp32", 8, found, {}, numbers, numbers)


def test_measures_all_and_writes_what_it_prints(
    bench: Any, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    arguments = ["--config", config, "--rounds=2", f"--json={file}", *overrides("train.global_batch_size=4")]
    assert bench.main(arguments) == 0  # no bars at this shape
    data = json.loads(file.read_text())["steps"]
    assert (data["precision"], data["tokens"]) == ("fp32", 32)
    parameters = {name: found["parameters"] for name, found in data["candidates"].items()}
    assert parameters["moe"] == parameters["transformers"] == parameters["flat AdamW"] > parameters["dense"]
    for found in data["candidates"].values():
        seconds = {what: torch.tensor(times) for what, times in found["seconds"].items()}
        assert len(seconds["total"]) == 2
        apart = seconds["data"] + seconds["forward"] + seconds["backward"] + seconds["optimizer"]
        assert ((apart > 0) & (apart <= seconds["total"] * 1.001)).all()
    inside = {part["part"].strip(): part["seconds"] for part in data["parts"]["moe"]}
    assert min(inside[part] for part in ("router", "MoE layer", "forward", "backward")) > 0
    assert {part["part"] for part in data["parts"]["dense"]} >= {"  attention", "  FFN", "  output words"}
    lines = capsys.readouterr().out.splitlines()
    for ratio in data["ratios"]:
        assert ratio["bar"] is None
        assert sum(line.startswith(f"{ratio['what']}: ") for line in lines) == 1


def test_each_bar_is_judged_by_the_end_of_its_interval(bench: Any) -> None:
    near = measured(bench, moe=[1.2] * 8 + [1.1] * 2, dense=[1.0] * 10, flat=[1.0] * 10)
    found = {each.what: each for each in bench.judge(near, "demo")}
    assert not found["forward and backward, moe / dense"].holds
    assert not found["tokens/s, moe / transformers"].holds
    assert not found["optimiser, moe / flat AdamW"].holds
    assert not found["update, moe / flat AdamW"].holds
    assert all(each.holds for each in bench.judge(near, None))
    fast = measured(bench, moe=[1.0] * 4 + [0.7] * 6, dense=[1.0] * 10, flat=[1.0] * 10)
    assert all(each.holds for each in bench.judge(fast, "demo"))


def test_a_shape_is_recognised_and_has_bars_only_if_all_blocks_are_moe(bench: Any) -> None:
    shapes = sys.modules["steps.shapes"]
    for name, shape in shapes.SHAPES.items():
        config = tiny(*shape.overrides())
        assert shapes.name_of(config) == name
        assert shapes.name_of(tiny(*shape.overrides(), "moe.layers.every=2")) is None
    assert shapes.name_of(tiny()) is None


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("moe.num_shared_experts=1", "moe.num_shared_experts is 1"),
        ("moe.layers.every=2", "moe.layers.every is 2"),
        ("moe.router.scorer=cosine", "moe.router.scorer.name is cosine"),
        ("model.norm=layernorm", "model.norm is layernorm"),
        ("moe.losses.importance=0.1", "it has no loss importance"),
    ],
)
def test_what_no_mixtral_has_leaves_transformers_out(bench: Any, override: str, why: str) -> None:
    module = sys.modules["steps.transformers_model"]
    with pytest.raises(sys.modules["layers.candidate"].NotMeasured) as message:
        module.TransformersModel(tiny(override), torch.device("cpu"))
    assert str(message.value).startswith(why)


def test_ranks_share_the_batch(bench: Any, config: str, tmp_path: Path) -> None:
    given = overrides("train.micro_batch_size=4")
    configs = bench.Asked(config, given, ranks=2).moe_and_dense(3, str(tmp_path))
    for found in configs.values():
        assert (found.train.micro_batch_size, found.train.global_batch_size) == (2, 4)
    assert [found.parallel.expert for found in configs.values()] == [2, 1]
    assert configs["dense"].model.ffn_hidden_size == 24


@pytest.mark.full
def test_two_ranks_are_measured(bench: Any, config: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    arguments = ["--ranks=2", "--config", config, "--rounds=1", f"--json={file}"]
    assert bench.main([*arguments, *overrides("train.micro_batch_size=4")]) == 0
    assert {"moe", "dense"} <= json.loads(file.read_text())["steps"]["candidates"].keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--memory", "--rounds", "2"],
        ["--ranks", "3"],
        ["--json", "no/such/folder/found.json"],
        ["model.hiden_size=8"],
    ],
)
def test_a_mistake_is_one_line(
    bench: Any, config: str, arguments: list[str], mistake: Callable[..., str]
) -> None:
    mistake(bench.main, ["--config", config, *overrides(), *arguments])
