"""The recipes of examples/recipes have the published numbers of parameters, and fit on the cluster that each
names; and every run in examples can be planned.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe.apps.verify.small import shrunk
from megamoe.config import load_config, parse_config
from megamoe.config.shapes import padded_vocab_size
from megamoe.errors import ExitCode
from megamoe.model.size import model_size
from megamoe.train.loop import train
from tests.apps.plan.test_simulation import run_in_process
from tests.test_examples import EXAMPLES, ROOT

RECIPES = ROOT / "examples/recipes"
PARTS = 8  # of the other examples
OPEN = (
    "glm_4_5_air",
    "moonlight_16b_a3b",
    "gpt_oss_20b",
    "kimi_k2",
    "ling_mini_2",
    "dots_llm1",
    "minimax_m2",
)
PUBLISHED = json.loads((RECIPES / "published.json").read_text())


def test_every_recipe_names_a_source_and_its_numbers() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == PUBLISHED.keys()
    for path in RECIPES.glob("*.yaml"):
        comment = path.read_text().split("\nname:")[0]
        assert re.search(r" (et al\.|Team|DeepSeek-AI|OpenAI|MiniMax) 20\d\d", comment), path
        assert PUBLISHED[path.stem]["source"], path
        differences = load_config(path).differences
        assert "mock data stand for the corpus; name yours in data.sources" in differences, path
        assert len(differences) > 1, path
        assert len(plan_command(path.stem)) > 1, path


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_the_published_ones(name: str) -> None:
    """The total: within 1 %, or half a unit of the table, and that of the weights if they are published. The
    active ones within 1 %, or a unit, as some publications round down.
    """
    published = PUBLISHED[name]
    config = load_config(RECIPES / f"{name}.yaml", published.get("counted_with", []))
    words = config.model.vocab_size
    assert words is not None
    size = model_size(config, words)
    assert abs(size.total - published["total"]) <= max(published["total"] / 100, published["unit"] / 2)
    if "in_checkpoint" in published:  # with the bias of each expert, which is a buffer here
        assert size.total + published.get("buffers", 0) == published["in_checkpoint"]
    if "active" in published:
        input_words = padded_vocab_size(words, config.model.vocab_multiple) * config.model.hidden_size
        active = size.active - (input_words if published.get("without_input_embedding") else 0)
        assert abs(active - published["active"]) <= max(published["active"] / 100, published["active_unit"])


@pytest.mark.usefixtures("restored_process")
@pytest.mark.parametrize(
    "name",
    [name if name in OPEN else pytest.param(name, marks=pytest.mark.full) for name in sorted(PUBLISHED)],
)
def test_a_small_version_trains(name: str, tmp_path: Path) -> None:
    """With a few blocks of every kind, narrow, on mock tokens of 64 words."""
    tree, _ = shrunk(load_config(RECIPES / f"{name}.yaml"))
    config = parse_config(tree | {"output": str(tmp_path)})
    assert train(config) == ExitCode.FINISHED
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(3 < row["train/lm_loss"] < 6 for row in rows if "train/lm_loss" in row)  # ln 64 = 4.2


def plan_command(name: str) -> list[str]:
    """Return the command of the recipe's first comment, without `python`."""
    comment = (RECIPES / f"{name}.yaml").read_text().split("\nname:")[0]
    found = re.search(r"^#   python (tools/plan\.py --config examples/recipes/\S+ .*)$", comment, flags=re.M)
    assert found is not None and f"/{name}.yaml" in found[1], name
    return shlex.split(found[1])


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_recipe_fits_on_its_cluster(name: str, tmp_path: Path) -> None:
    """Planned by its own command, within 8 GiB and 60 s of CPU time: 300 s with Muon or attention sinks.

    With Muon the whole model is simulated, and sinks have thousands of operators.
    """
    arguments = [*plan_command(name), "--json", str(tmp_path / "plan.json")]
    command = [sys.executable, "-W", "ignore", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    plan, config = json.loads((tmp_path / "plan.json").read_text()), load_config(RECIPES / f"{name}.yaml")
    assert plan["fits"] and plan["differences"] == config.differences
    is_long = config.optimizer.name == "muon" or config.model.attention.sinks
    assert used.ru_utime + used.ru_stime < (300 if is_long else 60)
    assert used.ru_maxrss < 8 << 20  # KiB


@pytest.mark.full
@pytest.mark.parametrize("part", range(PARTS))
def test_every_example_can_be_planned(part: int) -> None:
    """But those that learn from labels or pairs of texts, for which mock data cannot stand.

    Three are planned by the quick tests, see tests/apps/plan. A process plans some twenty.
    """
    paths = [str(path.relative_to(ROOT)) for path in EXAMPLES if path.parent.name != "recipes"][part::PARTS]
    [verdicts] = run_in_process("tests.support.apps.check_plans", *paths)
    refused = {name: verdict for name, verdict in verdicts.items() if verdict}
    assert {
        name: verdict for name, verdict in refused.items() if "set data.mock to false" not in verdict
    } == {}
    assert all(any(word in name for word in ("label", "glue", "translation", "wmt")) for name in refused)
    assert verdicts.keys() == set(paths)
