"""tools/count_parameters.py: its table. tools/study_configurations.py: the runs of a published study."""

import json
from pathlib import Path

import pytest

from megamoe.config import load_config
from tests.support.tiny import tool

EXAMPLES = Path(__file__).parents[1] / "examples"


def output(name: str, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert tool(name).main([str(each) for each in arguments]) == 0
    return capsys.readouterr().out


def test_counts_beside_the_published_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A decoder by hand: 64 x 16 words, and for each block attention 4 x 16^2, FFN 3 x 16 x 24, two norms."""
    text = "name: one\nmodel: {num_layers: 2, hidden_size: 16, num_attention_heads: 2, ffn_hidden_size: 24}\n"
    (tmp_path / "one.yaml").write_text(text + "moe: {layers: none}\ndata: {sources: ['gone/*']}")
    (tmp_path / "published.json").write_text('{"one": {"total": 5000}}')
    rows = output(
        "count_parameters", capsys, tmp_path, "--published", tmp_path / "published.json", "--vocab-size", 64
    ).splitlines()
    blocks = 2 * (4 * 16**2 + 3 * 16 * 24 + 2 * 16) + 16
    total = 64 * 16 + blocks
    expected = ["one", f"{total:,}", f"{total:,}", "0", f"{blocks:,}", "5,000"]
    assert rows[1].split() == [*expected, f"{100 * (total / 5000 - 1):+.2f}", "%"]


@pytest.mark.parametrize("folder", ["papers", "recipes"])
def test_every_list_of_published_numbers_is_taken(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    published = EXAMPLES / folder / "published.json"
    rows = output("count_parameters", capsys, EXAMPLES / folder, "--published", published).splitlines()
    compared = {row.split()[0] for row in rows if row.endswith("%")}
    assert compared == json.loads(published.read_text()).keys()
    assert not [row for row in rows if folder == "recipes" and "deepseek_v3" in row and "+0.00 %" not in row]


def test_the_configurations_of_a_study_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a run are what it was trained by; a results.json with another digest names the row."""
    monkeypatch.chdir(EXAMPLES.parent)
    command = tool("study_configurations")
    results = json.loads(Path("docs/lab/tournament/results.json").read_text())
    results["configurations"]["dense"] = "0" * 64
    (tmp_path / "results.json").write_text(json.dumps(results))
    arguments = [str(tmp_path / "results.json"), str(tmp_path / "again")]
    assert command.main(arguments) == 1
    assert "\ndense: not the configuration of the results" in capsys.readouterr().out
    names = {path.stem.rpartition("-")[0] for path in (tmp_path / "again/configurations").iterdir()}
    assert {"dense", "top_2", "switch"} <= names
    config = load_config(tmp_path / "again/configurations/top_2-1.yaml")
    assert config.moe.router.selector.options.k == 2
    assert command.main(["README.md", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: README.md: no results.json of a study")
