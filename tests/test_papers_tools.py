"""tools/count_parameters.py: its table."""

import json
from pathlib import Path

import pytest

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
