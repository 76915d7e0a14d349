"""Every command on a page is run, is tested elsewhere, or has a reason not to be: tests/commands.yaml."""

import os
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.commands import BEFORE, PAGES, ROOT, RULES, RUN, TWO, TWO_STEPS, commands_of, rule_of
from tests.test_tutorial import as_cloned

COMMANDS = dict.fromkeys(command for page in PAGES for command in commands_of(page))


def to_run() -> list[str]:
    """The commands that are run, in the order of the rules: data first, pruning late, training last."""
    found = [(RULES.index(rule), it) for it in COMMANDS if (rule := rule_of(it)) and rule.how in (RUN, TWO)]
    return [it for _, it in sorted(found, key=lambda pair: pair[0])]


def test_every_command_of_the_pages_has_a_rule_and_every_rule_a_command() -> None:
    assert len(COMMANDS) > 120
    rules = {command: rule_of(command) for command in COMMANDS}
    assert [command for command, rule in rules.items() if rule is None] == []
    used = Counter(rule.pattern for rule in rules.values() if rule is not None)
    assert [rule.pattern for rule in RULES if not used[rule.pattern]] == []


def test_the_named_tests_exist_and_the_rest_says_why_not() -> None:
    for rule in RULES:
        assert rule.how in (RUN, TWO) or rule.how.startswith("not run: ") or (ROOT / rule.how).exists(), rule
    assert len(to_run()) > 30


def test_a_new_command_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("```\npython tools/new.py a \\\n    b   # why\nstep 1\n```\n")
    assert list(commands_of(tmp_path / "page.md")) == ["python tools/new.py a b"]
    assert rule_of("python tools/new.py a b") is None


@pytest.mark.full
def test_the_commands_run(tmp_path: Path) -> None:
    """All in one clone, one after the other; every failure is told at the end."""
    as_cloned(tmp_path)
    environment = {**os.environ, "PATH": f"{tmp_path}/.venv/bin:{os.environ['PATH']}"}
    first, *others = to_run()
    assert "prepare_data" in first
    failed = []
    for command in (first, *BEFORE, *others):
        rule = rule_of(command)
        line = (
            f"{command} {TWO_STEPS}"
            if rule is not None and rule.how == TWO and command not in BEFORE
            else command
        )
        begun = time.monotonic()
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", line],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800,
        )  # fmt: skip
        print(f"{done.returncode} {time.monotonic() - begun:.0f} s {line}", flush=True)
        if done.returncode:
            failed.append(f"{line}\n{done.stdout[-500:]}\n{done.stderr[-1500:]}")
    assert not failed, "\n\n".join(failed)
