"""The tutorial's files and configurations are right; `make test-full` runs its commands as written."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megamoe.config import load_config
from megamoe.moe.part import StepContext
from megamoe.moe.validation import check_parts
from tests.commands import TUTORIAL
from tests.support.moe.build import make_hidden, make_layer

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r'(?P<mark><!-- not run: (?P<reason>[^>]+) -->\n)?^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n'
    r"(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code: a file of its own, or commands; reason: why they are not run here."""

    language: str
    text: str
    title: str | None
    reason: str | None


def blocks_of(page: Path) -> Iterator[Block]:
    for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(match["language"], match["text"], match["title"], match["reason"])


def write_files(folder: Path) -> None:
    """What a reader saves, beside the examples that it names."""
    for page in TUTORIAL:
        for block in blocks_of(page):
            if block.title:
                (folder / block.title).write_text(block.text, encoding="utf-8")


def test_there_are_four_parts_and_every_block_is_a_file_commands_or_output() -> None:
    assert [page.name[:2] for page in TUTORIAL] == ["1_", "2_", "3_", "4_"]
    for page in TUTORIAL:
        blocks = list(blocks_of(page))
        assert any(block.language == "sh" for block in blocks), page.name
        assert all(block.language in ("sh", "text") or block.title for block in blocks), page.name
        assert page.read_text().count("```") == 2 * len(blocks), f"{page.name}: a block that no test reads"


def test_the_configurations_are_valid_and_the_loss_learns(tmp_path: Path, own_registry: None) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_files(tmp_path)
    small, idea = (load_config(tmp_path / name) for name in ("small.yaml", "idea.yaml"))
    assert set(small.moe.losses) == {"switch_balance"} and set(idea.moe.losses) == {"mutual_information"}
    check_parts(idea.moe, expert_parallel=2)
    layer = make_layer(idea.moe, StepContext(step=1))
    layer(make_hidden(24)).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.router.scorer.parameters())


def as_cloned(folder: Path) -> None:
    """A folder like a fresh clone, whose environment is that of this test: nothing is installed again."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("data", "runs", "build", "dist", "logs"):
            (folder / path.name).symlink_to(path)
    (folder / ".venv").mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != ".complete":
            (folder / ".venv" / path.name).symlink_to(path)
    version = ".".join(map(str, sys.version_info[:2]))
    (folder / ".venv/.complete").write_text(f"{folder}, Python {version}\n")


@pytest.mark.full
def test_every_command_runs_as_written(tmp_path: Path) -> None:
    """One part after the other in one clone, as a reader would: the demo's 300 steps take longest."""
    as_cloned(tmp_path)
    environment = {**os.environ, "PATH": f"{tmp_path}/.venv/bin:{os.environ['PATH']}"}
    for page in TUTORIAL:
        begun = time.monotonic()
        for block in blocks_of(page):
            if block.title:
                (tmp_path / block.title).write_text(block.text, encoding="utf-8")
            elif block.language == "sh" and block.reason is None:
                done = subprocess.run(
                    ["bash", "-e", "-o", "pipefail", "-c", block.text],
                    cwd=tmp_path,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=3600,
                )
                told = f"{page.name}\n{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
                assert done.returncode == 0, told
        print(f"{page.name}: {time.monotonic() - begun:.0f} s")  # what docs/index.md says; see it by -s
    assert (tmp_path / "runs/demo/routing/load.png").is_file()
    assert "The idea balances better" in (tmp_path / "runs/lab/study_cpu/page/index.md").read_text()
    assert (tmp_path / "exported/config.json").is_file()
    assert (tmp_path / "runs/moving/checkpoints/step_00000060").is_dir()
