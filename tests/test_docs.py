"""The documentation says what is true: keys, links, and the README's examples."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megamoe.config import RunConfig, load_config, parse_config
from megamoe.config.parts import PartChoice
from megamoe.moe.part import Dims, StepContext
from megamoe.moe.router import build_part

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def keys_of(section: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, PartChoice):
            yield from keys_of(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_every_key_of_the_configuration_is_documented() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    documented = set(re.findall(r"^\| `([\w.]+)` \|", page, flags=re.MULTILINE))
    rampup = {"train.batch_rampup.start", "train.batch_rampup.increment", "train.batch_rampup.samples"}
    expected = set(keys_of(RunConfig())) - {"train.batch_rampup"} | rampup
    assert documented == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_commands_exist(page: Path) -> None:
    for name in re.findall(r"\b((?:examples|ds_configs|tools|benchmarks)/[\w/]+\.\w+)", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_the_readmes_yaml_is_a_run() -> None:
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert block is not None
    config = parse_config(yaml.safe_load(block[1]))
    assert config.moe.num_experts == 8
    assert config.moe.router.selector.options.k == 2


def test_the_readmes_router_is_a_plugin(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert block is not None
    # Under a name of its own: the example of the same name may be registered already.
    (tmp_path / "own.py").write_text(block[1].replace('"distance"', '"readme_distance"'))
    (tmp_path / "run.yaml").write_text("plugins: [own.py]\nmoe: {router: {scorer: readme_distance}}\n")
    config = load_config(tmp_path / "run.yaml")
    scorer = build_part(config.moe.router.scorer, Dims(hidden_size=4, num_experts=3))
    assert scorer(torch.randn(5, 4), StepContext()).shape == (5, 3)
