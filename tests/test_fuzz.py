"""`make fuzz`: cases are legal and repeatable, refusals name keys, and a failure becomes a small YAML."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megamoe.apps.verify.layouts import Variant
from megamoe.apps.verify.small import Changes
from megamoe.config import load_config
from tests import fuzz
from tests.fuzz import Case, Findings, draw_cases


def test_cases_are_legal_and_the_same_again() -> None:
    findings = Findings()
    cases = draw_cases(3, 1, findings)
    assert findings.wrong == []
    assert cases == draw_cases(3, 1, Findings())
    assert len({str(case) for case in cases}) == fuzz.RUNS * fuzz.LAYOUTS


def test_a_refusal_without_a_key_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Findings()
    monkeypatch.setattr(fuzz, "problems", lambda *unused: ["model.norm: found no", "cannot do this"])
    assert not found.legal(fuzz.base(), 1, "a change")
    assert [line.partition(":")[0] for line in found.wrong] == ["NO KEY in what refuses a change"]


def test_a_failure_is_shrunk_to_a_yaml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fuzz, "OUTPUT", tmp_path / "fuzz")

    def judge(case: Case, *unused: Any) -> str:
        fails = case.tree["model"]["norm"] == "layernorm" and "parallel.tensor" in case.variant.changes
        return "weights differ" * fails

    monkeypatch.setattr(fuzz, "judge", judge)
    two: Changes = {"model.norm": "layernorm", "model.position": "learned"}
    features: tuple[Changes, ...] = ({"model.bias": True}, two)
    case = Case(5, features, Variant(4, {"zero": 1, "parallel.tensor": 2}))
    small = fuzz.smallest(case, tmp_path, None)  # type: ignore[arg-type]
    assert small == Case(5, ({"model.norm": "layernorm"},), Variant(2, {"parallel.tensor": 2}))
    path = fuzz.write(small, "weights differ", 1)
    assert path.read_text().startswith("# seed 1, case 5: 2 ranks, TP 2\n# weights differ\n")
    assert yaml.safe_load(path.read_text())["model"]["norm"] == "layernorm"
    assert load_config(path).parallel.tensor == 2
