"""`megamoe verify`: the small run has the run's parts, equal layouts are equal, and a fault is named."""

from pathlib import Path

import pytest

from megamoe.apps.verify import command
from megamoe.apps.verify.compare import Result, differences
from megamoe.apps.verify.layouts import Variant, own_variant, variants_of
from megamoe.apps.verify.mock_data import mock_data
from megamoe.apps.verify.session import FP32, Session
from megamoe.apps.verify.small import changed, shrunk
from megamoe.config import load_config, parse_config
from tests.support.ranks.runs import ROOT

EXAMPLES = ROOT / "examples"
# The gradient of this loss depends on the rank.
FAULTY = """
import os
from dataclasses import dataclass
from megamoe.moe.part import Part
from megamoe.registry import register

@register("loss", "of_rank")
class OfRank(Part):
    @dataclass
    class Config:
        weight: float = 0.1

    def forward(self, routing, context):
        return routing.probs_TE.square().mean() * (1 + int(os.environ.get("RANK", "0")))
"""


@pytest.mark.parametrize("name", ["recipes/deepseek_v3", "layers_that_differ", "t5", "presets/moec"])
def test_the_small_run_has_the_parts_of_the_run(name: str) -> None:
    config = load_config(EXAMPLES / f"{name}.yaml")
    tree, lines = shrunk(config)
    smaller = parse_config(tree)
    for of_run, of_small in zip(
        [config.moe, *config.moe.groups], [smaller.moe, *smaller.moe.groups], strict=True
    ):
        assert of_small.router == of_run.router
        assert of_small.losses == of_run.losses
    assert smaller.optimizer.name == config.optimizer.name
    assert smaller.train.objective == config.train.objective
    assert smaller.model.hidden_size < config.model.hidden_size
    assert smaller.model.vocab_size == 64
    assert any(line.startswith("width") for line in lines)


def test_own_layout_has_every_kind_at_size_two() -> None:
    overrides = ["parallel.pipeline=16", "parallel.expert=64", "parallel.tensor=4", "parallel.sequence=true"]
    config = load_config(EXAMPLES / "recipes" / "deepseek_v3.yaml", overrides)
    tree, _ = shrunk(config)
    assert str(own_variant(config, 1, tree)) == (
        "4 ranks, PP 2, TP 2, EP 2, SP, model.recompute full, ZeRO 1"
    )


def test_a_run_in_bf16_is_compared_in_both_precisions() -> None:
    overrides = [f"parallel.deepspeed={ROOT / 'ds_configs' / 'zero1_bf16.json'}", "parallel.expert=2"]
    config = load_config(EXAMPLES / "demo.yaml", overrides)
    own, in_bf16, *_ = variants_of(config, shrunk(config)[0])
    assert list(map(str, [own, in_bf16])) == [
        "2 ranks, EP 2, ZeRO 1",
        "2 ranks, EP 2, ZeRO 1, precision bf16",
    ]


@pytest.mark.parametrize("name", ["presets/base", "recipes/qwen3_30b_a3b"])
def test_parts_over_all_ranks_are_compared_with_as_large_a_micro_batch(name: str) -> None:
    """An assignment of the tokens of all ranks, and a balance loss over the global batch.

    A loss of one rank's tokens beside them would change: they are compared with as many ranks.
    """
    tree, _ = shrunk(load_config(EXAMPLES / f"{name}.yaml"))
    beside = changed(tree, {"moe.losses": {"importance": 0.1}, "moe.router.selector": "balanced"})
    assert Variant(4, {"parallel.tensor": 2}).alone(beside) == Variant(2, {})
    alone = [Variant(4, changes).alone(tree) for changes in ({}, {"parallel.tensor": 4})]
    assert alone == [Variant(1, {"train.micro_batch_size": 4}), Variant(1, {})]


@pytest.mark.parametrize(
    "name", ["catalogues/translation_small_moec", "chat_small", "catalogues/labels_small_dense"]
)
def test_tasks_get_small_data_of_their_kind(name: str, tmp_path: Path) -> None:
    config = load_config(EXAMPLES / f"{name}.yaml", [*command.WITHOUT_DATA])
    tree, lines = shrunk(config, mock_data(config, tmp_path))
    assert "data: short texts of its kind" in lines
    assert parse_config(tree).train.objective.name == config.train.objective.name


def test_a_metric_near_zero_may_differ_by_the_rounding_of_larger_terms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The entropy of gates that are nearly 1; found by `make fuzz`."""
    monkeypatch.setattr(Result, "tensors", lambda *unused: {})
    one, other, wrong = (Result([{"gate_entropy": [value]}] * 2, ROOT) for value in (2e-7, 4e-7, 1e-5))
    assert differences(other, one, None, *FP32)[0] == []
    assert differences(wrong, one, None, *FP32)[0]


def test_each_simpler_layout_has_one_thing_less() -> None:
    simpler = Variant(4, {"parallel.pipeline": 2, "zero": 1}).simpler()
    assert list(map(str, simpler)) == ["2 ranks, PP 2, ZeRO 1", "4 ranks, ZeRO 1", "4 ranks, PP 2"]


def verified(capsys: pytest.CaptureFixture[str], config: Path, *arguments: str) -> tuple[int, list[str]]:
    code = command.main(["--config", str(config), *arguments])
    return code, capsys.readouterr().out.splitlines()


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, lines = verified(capsys, tmp_path / "none.yaml")
    assert (code, lines) == (2, [])


def test_several_runs_are_verified_and_refused_layouts_are_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "compare", lambda *unused: ([], {}, ""))
    dense, both = EXAMPLES / "demo_dense.yaml", ["--config", str(EXAMPLES / "demo.yaml")]
    code, lines = verified(capsys, dense, *both, "--only", "2 ranks, EP 2")
    verdicts = [line for line in lines if line.startswith(("all", "no", "a layout"))]
    assert (code, verdicts) == (1, ["no layout was compared", "all layouts are equal to one rank"])


def test_gpus_that_are_not_there_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert command.main(["--config", str(EXAMPLES / "demo.yaml"), "--device", "cuda"]) == 2
    expected = "error: --device: found cuda, but PyTorch sees no GPU here; expected cpu"
    assert capsys.readouterr().err.splitlines() == [expected]


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_a_faulty_part_is_named_with_the_smallest_layout(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    own_registry: None,
    tmp_path: Path,
    precision: str,
) -> None:
    monkeypatch.setattr(command, "MOST_TRIES", 4)
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "run.yaml").write_text(
        f"base: {EXAMPLES / 'demo.yaml'}\nplugins: [faulty.py]\nmoe: {{losses: {{of_rank: 0.5}}}}\n"
    )
    layout = "2 ranks, ZeRO 1" + ", precision bf16" * (precision == "bf16")
    own = f"parallel.deepspeed={ROOT / 'ds_configs' / f'zero1_{precision}.json'}"
    code, lines = verified(capsys, tmp_path / "run.yaml", "--only", layout, own)
    assert code == 1
    assert [line for line in lines if line.startswith(("equal", "DIFFERS"))] == [f"DIFFERS    {layout}"]
    assert "  smallest: 2 ranks" in lines
    assert any("gradients" in line and "router.scorer.weight" in line for line in lines)


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        *("demo", "own_parts", "presets/xmoe_threshold", "presets/base", "recipes/deepseek_v3", "t5"),
        *("chat_small", "catalogues/translation_small_moec"),
    ],
)
def test_all_layouts_are_equal(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, lines = verified(capsys, EXAMPLES / f"{name}.yaml")
    assert (code, lines[-1]) == (0, "all layouts are equal to one rank")
    assert sum(line.startswith("equal") for line in lines) >= 10
