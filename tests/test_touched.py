"""`make test-quick`: tests/touched.py chooses the tests nearest to the touched files, and stops in time."""

import time
from pathlib import Path

import pytest

from tests import touched

ROOT = Path(__file__).parents[1]


def chosen(*files: str) -> list[str]:
    return [str(test.relative_to(ROOT / "tests")) for test in touched.nearest_tests(list(files))]


def test_the_test_of_a_touched_file_comes_first_then_its_folder_then_its_package() -> None:
    tests = chosen("megamoe/moe/losses/switch_balance.py")
    assert tests[0] == "moe/losses/test_switch_balance.py"
    of_folder = sorted(f"moe/losses/{path.name}" for path in (ROOT / "tests/moe/losses").glob("test_*.py"))
    assert sorted(tests[: len(of_folder)]) == of_folder
    assert "moe/test_registered.py" in tests[: touched.MOST_FILES]


def test_what_imports_a_file_comes_before_what_imports_that() -> None:
    tests = chosen("megamoe/parallel/chunks.py")
    assert tests[0] == "parallel/test_chunks.py"
    assert tests.index("optim/test_muon.py") < tests.index("checkpoint/test_writer.py")


def test_every_form_of_an_import_is_found(tmp_path: Path) -> None:
    path = tmp_path / "forms.py"
    path.write_text(
        "import megamoe.moe.rng as draws, tests.touched  # import megamoe.cli\n"
        "from megamoe.moe import (\n    routing,  # megamoe.errors\n    layer as of_moe,\n)\n"
        "def f() -> None:\n    from megamoe.io import read_plain\n    from numpy import array\n"
    )
    found = {"megamoe.moe.rng", "tests.touched", "megamoe.moe.routing", "megamoe.moe.layer", "megamoe.io"}
    assert set(touched.imports_of(path)) == found


def test_helpers_pages_tools_and_examples_have_their_tests() -> None:
    assert "checkpoint/format/test_hostile.py" in chosen("tests/support/hostile.py")
    assert "test_docs.py" in chosen("docs/run/runs.md")
    assert "test_list_parts.py" in chosen("tools/list_parts.py")
    assert "test_examples.py" in chosen("examples/demo.yaml")
    assert chosen("LICENSE") != [] and chosen() == []


def test_a_file_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        touched.main(["megamoe/none.py"])
    assert ended.value.code == 2 and "megamoe/none.py: no such file" in capsys.readouterr().err


SLOW = """
import time
import pytest

@pytest.mark.parametrize("number", range(20))
def test_that_waits(number):
    time.sleep(0.2)
"""


def test_the_time_is_held_and_what_is_left_out_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_slow.py").write_text(SLOW)
    monkeypatch.setattr(touched, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(touched, "BUDGET_S", 0.7)
    monkeypatch.setattr(touched, "LEAST_S", 0.5)
    assert touched.run([tmp_path / "test_slow.py"], time.monotonic()) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.endswith("tests did not fit into the time; `make test` runs them all")
    assert 10 <= int(told.split()[0]) < 20
