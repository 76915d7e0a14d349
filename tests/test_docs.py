"""The documentation is correct: keys, links, and the README's examples."""

import re
import runpy
from pathlib import Path

import pytest
import torch
import yaml

from megamoe import registry
from megamoe.config import load_config, parse_config
from megamoe.moe.part import Dims, StepContext
from megamoe.moe.router import build_part
from megamoe.moe.validation import check_parts
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.run import validate
from tests.support import checkpoint
from tests.support.moe.build import make_hidden, make_layer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_commands_exist(page: Path) -> None:
    for name in re.findall(r"\b((?:examples|ds_configs|tools|benchmarks)/[\w/]+\.\w+)", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", blocks_of("docs/parts.md", "python"))
def test_the_examples_of_parts_are_plugins_that_learn(block: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(block)
    kind, name = re.search(r'@register\("(\w+)", "(\w+)"\)', block).groups()  # type: ignore[union-attr]
    tree = {
        "plugins": ["own.py"],
        "moe": {"num_experts": 4, "losses": {name: 0.1}}
        if kind == "loss"
        else {"num_experts": 4, "router": {f"{kind}s": [name]} if kind == "mask" else {kind: name}},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(tmp_path / "run.yaml").moe
    check_parts(config, expert_parallel=1)
    layer = make_layer(config, StepContext(step=1))
    output_TH = layer(make_hidden(24))
    (output_TH.square().sum() * (kind != "loss")).backward()
    assert output_TH.isfinite().all()
    assert all(p.grad is not None and p.grad.any() for p in layer.router.scorer.parameters())
    assert "Source: this page" in block  # what tools/list_parts.py would show


@pytest.mark.parametrize("block", blocks_of("docs/parts.md", "yaml"))
def test_the_yaml_of_parts_is_valid(block: str, tmp_path: Path) -> None:
    plugin = str(ROOT / "examples/own_router.py")
    (tmp_path / "run.yaml").write_text(block.replace("[own_router.py]", f"[{plugin}]"))
    check_parts(load_config(tmp_path / "run.yaml").moe, expert_parallel=1)


def test_a_tensor_is_found_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks_of("docs/checkpoints.md", "python")
    folder, name = re.findall(r'"([\w./]+)"', block.split("folder, name = ")[1])[:2]
    checkpoint.write(tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    for mine, tensor in checkpoint.tensors().items():
        if tensor.dtype is torch.float32:
            (tmp_path / "by_hand.py").write_text(block.replace(name, mine))
            assert torch.equal(runpy.run_path("by_hand.py")["whole"], tensor)


def test_the_picture_of_the_packages_is_drawn_from_the_imports() -> None:
    written = runpy.run_path(str(ROOT / "docs/site/package_map.py"))
    assert written["PICTURE"].read_text() == written["picture"](), "run python docs/site/package_map.py"


def test_the_readmes_yaml_is_a_run() -> None:
    run, mixture = (parse_config(yaml.safe_load(block)).moe for block in blocks_of("README.md", "yaml"))
    assert (run.num_experts, run.router.selector.options.k) == (8, 2)
    check_parts(mixture, expert_parallel=1)
    path = ROOT / "examples/presets/threshold_on_hypersphere_in_clusters.yaml"
    assert mixture.router == load_config(path).moe.router


def test_the_readme_names_every_preset() -> None:
    table = (ROOT / "README.md").read_text().split("| `router:` |")[1].split("\n\n")[0]
    names = re.findall(r"`(\w+)`", table.replace("`_v2`, `_v3`", "`deepseek_v2`, `deepseek_v3`"))
    assert sorted(names) == sorted(registry.list_presets())


def test_the_readmes_router_is_a_plugin(tmp_path: Path) -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert block is not None
    # Under a name of its own: the example of the same name may be registered already.
    (tmp_path / "own.py").write_text(block[1].replace('"distance"', '"readme_distance"'))
    (tmp_path / "run.yaml").write_text("plugins: [own.py]\nmoe: {router: {scorer: readme_distance}}\n")
    config = load_config(tmp_path / "run.yaml")
    scorer = build_part(config.moe.router.scorer, Dims(hidden_size=4, num_experts=3))
    assert scorer(torch.randn(5, 4), StepContext()).shape == (5, 3)


def test_the_tests_named_on_the_page_of_faults_exist() -> None:
    rows = re.findall(
        r"^\|.*\| `(tests/[^`]*)` \|$", (ROOT / "docs/faults.md").read_text(), flags=re.MULTILINE
    )
    assert rows
    for row in rows:
        file, _, name = row.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), flags=re.MULTILINE), row


def commands_on_ranks() -> list[tuple[int, str, list[str]]]:
    """(ranks, configuration, overrides) of every torchrun command in README and docs."""
    pattern = re.compile(
        r"^torchrun .*--nproc-per-node (\d+) .*pretrain_gpt_moe\.py --config (\S+)(.*)$", re.M
    )
    pages = [ROOT / "README.md", ROOT / "pretrain_gpt_moe.py", *sorted((ROOT / "docs").glob("*.md"))]
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages]
    found = [match for text in texts for match in pattern.findall(text)]
    return [(int(ranks), config, overrides.split()) for ranks, config, overrides in found]


@pytest.mark.parametrize(("ranks", "config", "overrides"), commands_on_ranks())
def test_example_commands_have_legal_layouts_and_batch_sizes(
    ranks: int, config: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = load_config(config, overrides)
    assert not list(validate(run, ranks, resolve_parallel(run, ranks)))
