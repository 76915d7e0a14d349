"""tools/count_parameters.py and tools/papers_table.py: their tables, and their mistakes in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import pytest

from tests.support.tiny import tool


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


@pytest.mark.parametrize(
    ("published", "arguments", "message"),
    [
        ("{", (), "expected JSON"),
        ("[]", (), "expected a mapping of names"),
        ('{"one": {"total": 0}}', (), "'one': expected total, a whole number"),
        ('{"one": {"total": 3, "weight": 2}}', (), "of the others only unit"),
        ('{"two": {"total": 3}}', ("--vocab-size", 8), "'two' is not among the configurations"),
        ("{}", (), "model.vocab_size is not set; give --vocab-size"),
        ("{}", ("--vocab-size", 0), "--vocab-size: found 0, expected at least 1"),
    ],
)
def test_mistakes_of_counting(
    tmp_path: Path, refused: Callable[..., str], published: str, arguments: tuple[object, ...], message: str
) -> None:
    (tmp_path / "one.yaml").write_text("name: one")
    (tmp_path / "published.json").write_text(published)
    assert message in refused("count_parameters", tmp_path, "--published=published.json", *arguments)


def results(folder: Path, scores: dict[str, list[float]], majority: float) -> Path:
    """Write a results.json with the scores of each language, a seed after the other."""
    folder.mkdir()
    seeds = range(len(next(iter(scores.values()))))
    found = {
        "metrics": ["accuracy"],
        "seeds": {
            str(seed): {"sets": {name: {"accuracy": values[seed]} for name, values in scores.items()}}
            for seed in seeds
        },
        "sets": {name: {"examples": 7, "majority": {"accuracy": majority}} for name in scores},
    }
    (folder / "results.json").write_text(json.dumps(found))
    return folder / "results.json"


def translation(folder: Path, bleu: float, copy: float) -> Path:
    folder.mkdir()
    rows = {
        row: {name: {"score": score, "signature": "s"} for name in ("BLEU", "chrF", "chrF++")}
        for row, score in (("translation", bleu), ("copy", copy))
    }
    (folder / "t.json").write_text(json.dumps({"scores": rows, "step": 9, "sentences": [1, 2]}))
    return folder / "t.json"


def test_the_table_of_the_papers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"valid": [0.9, 0.9], "en": [0.7, 0.8], "de": [0.5, 0.7], "fr": [0.3, 0.3]}
    files = [
        results(tmp_path / "x_moe", scores, 0.4),
        translation(tmp_path / "moec", 20.0, 18.0),
        translation(tmp_path / "dense", 18.5, 18.0),
    ]
    written = tmp_path / "p.json", tmp_path / "p.md"
    text = output("papers_table", capsys, *files, "--json", written[0], "--markdown", written[1])
    assert f"x_moe  75.0 ± {stdev([70, 80]):.1f}  40.0      45.0 ± {stdev([40, 50]):.1f}" in text
    assert "1 of 2       +5.0 (at least 2)" in text
    assert "+2.0 (at least 1)" in text
    assert "+0.5 (less than 1)" in text
    found = json.loads(written[0].read_text())
    assert found["fine-tuned"][0]["others"] == pytest.approx([40, 50])
    assert [one["beats"] for one in found["translation"]] == [True, False]
    assert f"| de | 7 | {mean([50, 70]):.1f} ± {stdev([50, 70]):.1f} | 40.0 |" in written[1].read_text()
    strict = output("papers_table", capsys, *files[:1], "--margin", 6)
    assert "+5.0 (less than 6)" in strict


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("{", (), "expected JSON of finetune.py or translate.py"),
        ('{"step": 3}', (), "neither a results.json of finetune.py nor of translate.py --score --json"),
        (None, ("--language", "xx"), "--language: found xx, expected one of en, de"),
        (None, ("--metric", "f1"), "--metric: found f1, expected one of accuracy"),
        (None, ("--json", "gone/p.json"), "--json"),
    ],
)
def test_mistakes_of_the_table(
    tmp_path: Path, refused: Callable[..., str], content: str | None, options: tuple[str, ...], message: str
) -> None:
    path = results(tmp_path / "one", {"en": [0.5], "de": [0.5]}, 0.4)
    if content is not None:
        path.write_text(content)
    assert message in refused("papers_table", path, *options)
