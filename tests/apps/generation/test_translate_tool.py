"""tools/translate.py: what it writes, sacreBLEU's own numbers for it, several ranks, and bad input."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.generation.scores import default_tokenize, metrics_of, scored_twice
from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.support.data.pairs import make_pairs
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run
from tests.support.tiny import tool

TRANSLATING: dict[str, Any] = {
    "model__architecture": "encoder_decoder",
    "model__vocab_size": None,
    "model__num_attention_heads": 4,
    "data__mock": False,
    "data__document_aware": False,
    "data__split": [1, 0, 0],
    "data__sequence_length": 24,
    "moe__layers": {"encoder": {"at": [2]}, "decoder": {"at": [1], "insert_after": [2]}},
    "moe__num_shared_experts": 0,
    "moe__router": {"selector": {"name": "threshold", "threshold": 0.4}},
    "train__objective": {"name": "translation", "bucket": 2, "languages": ["de"], "too_long": "drop"},
    "train__micro_batch_size": 2,
}
DIRECTION = ["--from=en", "--to=de"]
LAYOUTS = [["parallel.expert=2"], ["parallel.tensor=2"], ["parallel.tensor=2", "parallel.sequence=true"]]


def saved(folder: Path, name: str, changes: dict[str, Any]) -> None:
    trainer = Trainer(small_run(folder, **changes, name=name))
    for _ in range(3):
        trainer.step()
    trainer.save()
    trainer._stream.close()
    trainer.saver.checkpoints.close()


def trained(folder: Path, pairs: Path) -> None:
    """Job: checkpoints of a model that translates, and of a decoder."""
    sources = [{"path": str(pairs / "train")}]
    try:
        saved(folder, "pairs", {**TRANSLATING, "data__sources": sources, "optimizer__lr": 0.02})
        saved(folder, "decoder", {"data__tokenizer": "bytes", "model__vocab_size": None})
    finally:
        launch.stop()


@pytest.fixture(scope="module")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("translated")
    pool.run(trained, folder, make_pairs(folder / "data", [0.8, 0.1, 0.1]), ranks=1)
    return folder


def called(folder: Path, calls: list[list[str]]) -> list[tuple[int, str, str]]:
    """Job: the exit code, the output and the errors of each call of the tool."""
    found = []
    for options in calls:
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = tool("translate").main([str(folder / options[0]), *options[1:]])
        found.append((code, out.getvalue(), err.getvalue()))
    return found


def by_sacrebleu(references: Path, hypotheses: Path) -> dict[str, tuple[float, str]]:
    """The scores and signatures of sacreBLEU's own command."""
    options = ["-m", "bleu", "chrf", "--chrf-word-order", "2", "-f", "json", "-w", "6"]
    command = [sys.executable, "-m", "sacrebleu", str(references), "-i", str(hypotheses), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return {row["name"]: (row["score"], row["signature"]) for row in json.loads(done.stdout)}


def test_what_it_writes_and_scores(pool: Pool, runs: Path) -> None:
    files = {name: runs / name for name in ("hypotheses", "references", "all.json")}
    (runs / "lines").write_text("\ufeff123\n\n77\n", encoding="utf-8")  # a mark of the byte order is no text
    written = [f"--output={files['hypotheses']}", f"--write-references={files['references']}"]
    of_lines = ["pairs", *DIRECTION, f"--input={runs / 'lines'}", "--max-length=8"]
    calls = [
        ["pairs", *DIRECTION, "--beams=1", "--n-best=1", "--score", *written, f"--json={files['all.json']}"],
        [*of_lines, "--beams=1"],
        [*of_lines, "--n-best=2", f"--json={runs / 'beams.json'}"],
    ]
    ((scored, lines, beams),) = pool.run(called, runs, calls, ranks=1)
    assert scored[0] == lines[0] == 0, scored[2] + lines[2]
    found = json.loads(files["all.json"].read_text())
    rows = found["sentences"]
    hypotheses, references = (files[name].read_text().splitlines() for name in ("hypotheses", "references"))
    assert references == [row["reference"] for row in rows] and set("".join(references)) == {"d"}
    assert hypotheses == [row["hypotheses"][0]["text"] for row in rows]
    assert all(row["source"].isdecimal() for row in rows)
    theirs = by_sacrebleu(files["references"], files["hypotheses"])
    for name, their_name in (("BLEU", "BLEU"), ("chrF++", "chrF2++")):
        ours = found["scores"]["translation"][name]
        assert (ours["score"], ours["signature"]) == (
            pytest.approx(theirs[their_name][0], abs=1e-5),
            theirs[their_name][1],
        )
        assert ours["signature"] in scored[1]
    assert found["scores"]["copy"]["chrF"]["score"] == 0 < found["scores"]["translation"]["chrF"]["score"]
    assert found["search"] == {"beams": 1, "length_penalty": 1.0, "n_best": 1, "max_length": None}
    assert beams[0] == 0, beams[2]
    searched = json.loads((runs / "beams.json").read_text())
    assert [row["source"] for row in searched["sentences"]] == ["123", "", "77"]
    assert [len(row["hypotheses"]) for row in searched["sentences"]] == [2, 0, 2]
    assert lines[1].count("\n") == 3 and lines[1].splitlines()[1] == ""


def test_scores_of_known_texts() -> None:
    references = ["The dog bit the man.", "It was not\nunexpected."]
    found = scored_twice(metrics_of("en"), [*references], ["Der Hund.", "Nein."], references)
    assert all(score["score"] == pytest.approx(100) for score in found["translation"].values())
    assert all(score["score"] < 20 for score in found["copy"].values())
    assert found["translation"]["chrF++"]["signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:2|")
    assert [default_tokenize(code) for code in ("de", "zh_CN", "zh-tw", "JA")] == ["13a", "zh", "zh", "char"]


@pytest.mark.full
def test_two_ranks_translate_as_one(pool: Pool, runs: Path) -> None:
    def calls(layout: list[str], name: str) -> list[str]:
        options = ["--beams=3", "--n-best=2", "--samples=6", "--max-length=9", "--batch-size=4"]
        return ["pairs", *DIRECTION, *options, f"--json={runs / name}", *layout]

    (alone,) = pool.run(called, runs, [calls([], "one.json")], ranks=1)
    assert alone[0][0] == 0, alone[0][2]
    wanted = json.loads((runs / "one.json").read_text())["sentences"]
    names = [f"two{number}.json" for number in range(len(LAYOUTS))]
    for layout, name in zip(LAYOUTS, names, strict=True):
        pool.run(called, runs, [calls(layout, name)], ranks=2)
    for name in names:
        found = json.loads((runs / name).read_text())["sentences"]
        for mine, theirs in zip(found, wanted, strict=True):
            assert [each["text"] for each in mine["hypotheses"]] == [
                each["text"] for each in theirs["hypotheses"]
            ]
            for one, other in zip(mine["hypotheses"], theirs["hypotheses"], strict=True):
                assert one["score"] == pytest.approx(other["score"], abs=1e-5)


MISTAKES = [
    (["decoder", *DIRECTION], "saved with model.architecture decoder; this tool reads encoder_de"),
    (["pairs", "--from=de", "--to=en"], "was not trained for it; it translates en-de"),
    (["pairs", "--from=en", "--to=it"], "--from en --to it: "),  # a language that it did not learn
    (["pairs", *DIRECTION, "--split=dev"], "there is test.pairs.json, train.pair"),
    (["pairs", *DIRECTION, "--input={}/blank"], "--input: has no text; expected a sentence"),
    (["pairs", *DIRECTION, "--input={}/long"], "line 2: its source has 42 tokens with tag and end"),
]


def test_mistakes_are_lines(pool: Pool, runs: Path) -> None:
    (runs / "blank").write_text("\n")
    (runs / "long").write_text(f"1\n{'1' * 40}\n")
    calls = [[option.format(runs) for option in options] for options, _ in MISTAKES]
    calls.append(["pairs", *DIRECTION, f"--input={runs / 'long'}", "--too-long=truncate", "--beams=1"])
    (found,) = pool.run(called, runs, calls, ranks=1)
    for (code, out, err), (_, expected) in zip(found, MISTAKES, strict=False):
        assert (code, out, err.count("\n")) == (2, "", 1) and expected in err, f"{expected}: {err}"
    code, out, err = found[-1]
    assert (code, out.count("\n")) == (0, 2) and "1 sources cut to data.sequence_length" in err
