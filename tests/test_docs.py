"""The documentation is correct: keys, links, ways on, and the examples of the pages."""

import dataclasses
import importlib
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megamoe import registry
from megamoe.cli import COMMANDS
from megamoe.config import RunConfig, load_config, parse_config
from megamoe.moe.part import StepContext
from megamoe.moe.validation import check_parts
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.run import validate
from tests.commands import ALL_PAGES
from tests.support import checkpoint
from tests.support.moe.build import make_hidden, make_layer
from tools.list_keys import GENERATED, keys_of

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(r"(?:tools/|^|[` ])(\w+)\.py((?:(?!\.py\b)[^\n`|#&;])*)", re.MULTILINE)
WITH_SUBCOMMANDS = ("checkpoint", "convert")


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    folder = GENERATED.get(page, page).parent
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith("http"):
            path = (folder / target).resolve()
            assert path.exists() or path in GENERATED.values(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_files_named_in_commands_exist(page: Path) -> None:
    if page.name == "LOG.md":
        return  # an entry names what was there at its date
    text = re.sub(r"`[^`]+`\s+of\s+commit [0-9a-f]{8}", "", page.read_text())
    for name in re.findall(r"\b((?:examples|ds_configs|tools|benchmarks)/[\w/]+\.\w+)", text):
        assert (ROOT / name).exists(), f"{page.name}: {name}"


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("block", blocks_of("docs/route/writing_parts.md", "python"))
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


@pytest.mark.parametrize("block", blocks_of("docs/route/parts.md", "yaml"))
def test_the_yaml_of_parts_is_valid(block: str, tmp_path: Path) -> None:
    plugin = str(ROOT / "examples/own_router.py")
    (tmp_path / "run.yaml").write_text(block.replace("[own_router.py]", f"[{plugin}]"))
    check_parts(load_config(tmp_path / "run.yaml").moe, expert_parallel=1)


def test_a_tensor_is_found_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks_of("docs/run/checkpoints.md", "python")
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


def test_pages_of_studies_are_written_from_their_results_and_name_rows_that_have_changed_since() -> None:
    script = runpy.run_path(str(ROOT / "docs/site/lab_index.py"))
    for page, text in script["pages"]().items():
        assert page.read_text() == text, f"{page}: run python docs/site/lab_index.py"
    assert f"\n\n{script['FORMER']}" in (ROOT / "docs/lab/yang2024_table1/index.md").read_text()


def test_the_first_page_shows_a_run_and_the_page_of_parts_a_mixture() -> None:
    (run,) = (parse_config(yaml.safe_load(block)).moe for block in blocks_of("docs/index.md", "yaml"))
    assert (run.num_experts, run.router.selector.options.k) == (8, 2)
    mixtures = [block for block in blocks_of("docs/route/parts.md", "yaml") if "level: cluster" in block]
    (mixture,) = (parse_config(yaml.safe_load(block)).moe for block in mixtures)
    path = ROOT / "examples/presets/threshold_on_hypersphere_in_clusters.yaml"
    assert mixture.router == load_config(path).moe.router


def test_the_readme_names_every_preset() -> None:
    table = (ROOT / "README.md").read_text().split("| `router:` |")[1].split("\n\n")[0]
    names = re.findall(r"`(\w+)`", table.replace("`_v2`, `_v3`", "`deepseek_v2`, `deepseek_v3`"))
    assert sorted(names) == sorted(registry.list_presets())


def test_the_readme_fits_two_screens() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 80 and text.count("\n|---") == 2 and text.count("![") == 1


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_every_page_has_a_way_on(page: Path) -> None:
    if page.parent == ROOT and page.name not in ("README.md", "CONTRIBUTING.md"):
        return
    ways = re.findall(r"^Next: (.+(?:\n.+)*)", page.read_text(), flags=re.MULTILINE)
    assert ways and all("](" in way for way in ways)


def keys_and_options() -> set[str]:
    """Every key of a run, and the options of parts below their stage."""
    keys = {key for key, *_ in keys_of(RunConfig, RunConfig())}
    for kind in ("score_function", "selector", "capacity"):
        parts: list[Any] = list(registry.list_parts(kind).values())
        for part in parts:
            keys |= {f"moe.router.{kind}.{field.name}" for field in dataclasses.fields(part.Config)}
    return keys | {f"moe.losses.{name}" for name in registry.list_parts("loss")}


def test_keys_beside_the_flags_of_megatron_exist() -> None:
    rows = re.findall(
        r"^\| `--.+ \| (.+) \|$", (ROOT / "docs/start/from_megatron.md").read_text(), flags=re.MULTILINE
    )
    named = {key for row in rows for key in re.findall(r"`([a-z_]+\.[\w.]+)", row)}
    assert len(rows) > 50 and named - keys_and_options() == set()


def test_commits_named_as_examples_exist() -> None:
    pages = [ROOT / "CONTRIBUTING.md", ROOT / "docs/change/howto.md"]
    named = {(page.name, sha) for page in pages for sha in re.findall(r"`([0-9a-f]{8})`", page.read_text())}
    assert {name for name, _ in named} == {page.name for page in pages}
    known = ["git", "cat-file", "--batch-check=%(objecttype)"]
    asked = "".join(f"{sha}\n" for _, sha in sorted(named))
    done = subprocess.run(known, cwd=ROOT, input=asked, capture_output=True, text=True)
    if done.returncode or shallow():
        pytest.skip("no history of git here")
    assert done.stdout.split() == ["commit"] * len(named)


def shallow() -> bool:
    command = ["git", "rev-parse", "--is-shallow-repository"]
    return "true" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


def test_the_tests_named_on_the_page_of_faults_exist() -> None:
    rows = re.findall(
        r"^\|.*\| `(tests/[^`]*)` \|$", (ROOT / "docs/run/faults.md").read_text(), flags=re.MULTILINE
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
    pages = [*ALL_PAGES, ROOT / "pretrain_gpt_moe.py"]
    texts = [page.read_text(encoding="utf-8").replace("\\\n", " ") for page in pages]
    found = [match for text in texts for match in pattern.findall(text)]
    # The tutorial's own configurations are tested beside it.
    return [(int(n), config, words.split()) for n, config, words in found if (ROOT / config).exists()]


@pytest.mark.parametrize(("ranks", "config", "overrides"), commands_on_ranks())
def test_example_commands_have_legal_layouts_and_batch_sizes(
    ranks: int, config: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run = load_config(config, overrides)
    assert not list(validate(run, ranks, resolve_parallel(run, ranks)))


def options_in_commands() -> dict[tuple[str, ...], set[tuple[str, str]]]:
    """For each command, or subcommand, the options that pages give it: (option, page)."""
    commands = {"pretrain_gpt_moe": "train"}
    for path in (ROOT / "tools").glob("*.py"):
        for name in re.findall(r'run\("([\w-]+)"\)', path.read_text()):
            commands[path.stem] = name
    found: dict[tuple[str, ...], set[tuple[str, str]]] = {}
    for page in ALL_PAGES:
        for script, words in COMMAND.findall(page.read_text(encoding="utf-8").replace("\\\n", " ")):
            options = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", words))
            if script in commands and options:
                name = commands[script]
                first = (words.split()[0],) if name in WITH_SUBCOMMANDS else ()
                if not first or not first[0].startswith("-"):
                    found.setdefault((name, *first), set()).update((option, page.name) for option in options)
    return found


@pytest.mark.full
def test_options_in_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    used = options_in_commands()
    assert sum(map(len, used.values())) > 100
    for (name, *subcommand), options in used.items():
        with pytest.raises(SystemExit):
            importlib.import_module(COMMANDS[name]).main([*subcommand, "--help"])
        told = capsys.readouterr().out
        missing = [(o, page) for o, page in options if not re.search(rf"(?<![\w-]){o}(?![\w-])", told)]
        assert not missing, (name, missing)
