"""The recipes of examples/papers: their parameters are the published ones, and the small ones train."""

import json
from pathlib import Path

import pytest

from megamoe.config import RunConfig, load_config
from megamoe.config.shapes import moe_layer_numbers
from megamoe.errors import ExitCode
from megamoe.model.size import embedding_size, model_size
from megamoe.train.loop import train

PAPERS = Path(__file__).parents[1] / "examples/papers"
SMALL = sorted(PAPERS.glob("*_small.yaml"))
LARGE = sorted(path for path in PAPERS.glob("*.yaml") if path not in SMALL)
PUBLISHED = json.loads((PAPERS / "published.json").read_text())
QUICK = ("x_moe_small", "moec_wmt14_small")  # the others are full tests
# No data is needed for these.
UNREAD = ["data.sources=[unread]", "data.validation={}"]


def large(name: str) -> RunConfig:
    return load_config(PAPERS / f"{name}.yaml", UNREAD)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(name: str) -> None:
    """Within 1 % or the rounding of the paper; otherwise the recipe states both numbers."""
    published, config = PUBLISHED[name], large(name)
    assert config.model.vocab_size is not None
    counted = model_size(config, config.model.vocab_size).total
    if published.get("without_embedding"):
        counted -= embedding_size(config, config.model.vocab_size)
    off = abs(counted - published["total"])
    agrees = off <= max(published["total"] / 100, published.get("unit", 0) / 2)
    assert agrees != published.get("explained", False)
    if not agrees:
        text = (PAPERS / f"{name}.yaml").read_text()
        assert f"{published['total'] / 1e9:g} B" in text
        assert "These sizes" in text


def test_every_recipe_has_a_small_one_and_a_source() -> None:
    assert {path.stem for path in SMALL} == {f"{path.stem}_small" for path in LARGE}
    assert PUBLISHED.keys() <= {path.stem for path in LARGE}
    for path in LARGE:
        comment = path.read_text().split("\nname:")[0].replace("\n# ", " ")
        assert " et al. 20" in comment, path
        assert any(word in comment for word in ("table", "section", "appendix")), path


def test_a_small_recipe_routes_like_its_large_one() -> None:
    """The parts and the losses are the same; only numbers may differ."""
    for path in SMALL:
        small, config = load_config(path, UNREAD), large(path.stem.removesuffix("_small"))
        assert bool(moe_layer_numbers(small)) == bool(moe_layer_numbers(config)), path
        assert small.train.objective.name == config.train.objective.name
        if moe_layer_numbers(config):
            routers = small.moe.router, config.moe.router
            for stage in ("scorer", "score_function", "selector", "capacity"):
                assert len({getattr(router, stage).name for router in routers}) == 1, (path, stage)
            assert small.moe.losses.keys() == config.moe.losses.keys()
            assert small.moe.expert_sublayers == config.moe.expert_sublayers
            assert [mask.name for mask in routers[0].masks] == [mask.name for mask in routers[1].masks]


def trained(path: Path, tmp_path: Path, *overrides: str, cluster_size: int = 0) -> list[float]:
    """Train a small recipe on mock data; recipes of pairs learn spans instead, which need the same model.

    cluster_size: of the clustering loss, one that the configuration refuses. Returns the loss of each step.
    """
    settings = [
        *UNREAD, "data.sources=[]", "data.mock=true", "data.split=[1, 0, 0]", "data.sampling_exponent=null",
        "data.sequence_length=32", "data.workers=0", "model.vocab_size=512", "train.steps=2",
        "optimizer.warmup_steps=0", "train.micro_batch_size=2", "train.global_batch_size=2",
        "evaluation.batches=0", "checkpoint.save_at_end=false", "log.report=false", f"output={tmp_path}",
    ]  # fmt: skip
    if load_config(path, UNREAD).train.objective.name == "translation":
        settings.append("train.objective={name: span_corruption}")
    config = load_config(path, [*settings, *overrides])
    if cluster_size:
        config.moe.losses["clustering"].options.cluster_size = cluster_size
    assert train(config) == ExitCode.FINISHED
    rows = [json.loads(line) for line in (tmp_path / path.stem / "metrics.jsonl").read_text().splitlines()]
    return [row["train/lm_loss"] for row in rows if "train/lm_loss" in row]


@pytest.mark.usefixtures("restored_process")
@pytest.mark.full
@pytest.mark.parametrize("task", ["wmt14", "glue"])
def test_moec_with_clusters_of_one_expert_is_its_baseline(task: str, tmp_path: Path) -> None:
    """ "MoEC is equivalent to MoE baseline" then (Xie et al. 2022, table 2), to the bit."""
    more = ("train.steps=20", "model.hidden_dropout=0.1", "log.every=1")
    moec = trained(PAPERS / f"moec_{task}_no_dropout_small.yaml", tmp_path, *more, cluster_size=1)
    baseline = trained(PAPERS / f"moec_{task}_x_moe_small.yaml", tmp_path, *more)
    assert moec == baseline and len(set(moec)) == 20


@pytest.mark.usefixtures("restored_process")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.full) for path in SMALL],
    ids=lambda path: path.stem,
)
def test_small_recipe_trains(path: Path, tmp_path: Path) -> None:
    losses = trained(path, tmp_path)
    assert len(losses) == 2
    assert all(4 < loss < 9 for loss in losses)  # ln 512 = 6.2
