"""Bad task files and examples: one line that names the key, or the file and the line."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from megamoe.apps.finetune.examples import read_examples
from megamoe.apps.finetune.task import load_task
from megamoe.config import to_dict
from megamoe.errors import UserError
from tests.support.apps.tasks import make_task
from tests.support.checkpoint_files import write_checkpoint
from tests.support.refusals import Case, cases, told
from tests.support.tiny import ROOT, tiny

LINE = {"text": "a", "label": "yes"}
NO = {**LINE, "label": "no"}
WORDS = {"words": ["a", "b"], "tags": ["A", "B"]}


@pytest.mark.parametrize("case", [*cases("finetune", "task: "), *cases("finetune", "examples: ")])
def test_a_task_with_a_mistake(tmp_path: Path, case: Case, expect_message: Callable[..., None]) -> None:
    changes = dict(case.row.get("changes", {}))
    if isinstance(test := changes.get("test"), str):
        changes["test"] = test.replace("FOLDER", str(tmp_path))
    path = make_task(tmp_path, case["task"], **changes)
    if "file" in case.row:
        (path.parent / case["file"]).write_text("".join(f"{line}\n" for line in case["lines"]))
    expect_message(case, told(lambda: read_examples(load_task(path, []))))


def test_tables_are_read_as_json_lines_are(tmp_path: Path) -> None:
    """A .tsv has no quotes, a .csv has; a text may hold what only Unicode takes for the end of a line."""
    path = make_task(tmp_path, "classification", test={"de": str(tmp_path / "de.tsv")})
    expected = [{"text": 'say "a\u2028b', "label": "no"}, {"text": "c, d", "label": "yes"}]
    (tmp_path / "de.tsv").write_text('label\ttext\textra\nno\tsay "a\u2028b\t1\nyes\tc, d\t2\n')
    assert read_examples(load_task(path, [])).sets["test.de"] == expected
    (tmp_path / "de.csv").write_text('label,text\nno,"say ""a\u2028b"\nyes,"c, d"\n')
    override = f"task.test={json.dumps({'de': str(tmp_path / 'de.csv')})}"
    assert read_examples(load_task(path, [override])).sets["test.de"] == expected
    (tmp_path / "de.csv").write_text("label,text\nno\n")
    with pytest.raises(UserError, match="de.csv', line 2: 1 cells, expected 2 as in the first line"):
        read_examples(load_task(path, [override]))


@pytest.mark.parametrize(
    ("name", "file", "lines", "bad"),
    [
        ("classification", "train.jsonl", ["{", json.dumps(LINE), json.dumps(NO), "3"], [1, 4]),
        ("classification", "test.de.jsonl", ['{"text": "\\ud800", "label": "no"}', json.dumps(LINE)], [1]),
        ("classification", "test.de.tsv", ["label\ttext", "no", "yes\ta", " \ta", "no\ta\tb"], [2, 4, 5]),
        ("regression", "valid.csv", ["text,label", "a,b", "a,1.5", "a,inf"], [2, 4]),
        ("tagging", "valid.jsonl", [json.dumps(WORDS), json.dumps({**WORDS, "tags": ["A"]})], [2]),
    ],
)  # fmt: skip
def test_bad_lines_are_left_out(
    tmp_path: Path, name: str, file: str, lines: list[str], bad: list[int]
) -> None:
    """With a file of bad lines alone there is no set."""
    task, path = make_task(tmp_path, name), tmp_path / name / file
    path.write_text("\n".join(lines))
    named = f"task.{file.split('.')[0]}={json.dumps({'de': str(path)} if 'test' in file else str(path))}"
    with pytest.raises(UserError, match=f"line {bad[0]}: .*; or leave such lines out with --bad-lines skip"):
        read_examples(load_task(task, [named]))
    found = read_examples(load_task(task, [named]), "skip")
    assert [int(text.split("line ")[1].split(":")[0]) for text in found.left_out] == bad
    head = 0 if file.endswith("jsonl") else 1
    assert len(found.sets[file.rpartition(".")[0]]) == len(lines) - head - len(bad)
    path.write_text("\n".join([*lines[:head], lines[bad[0] - 1]]))
    with pytest.raises(UserError, match="has no examples; .* the first of 1 bad lines: "):
        read_examples(load_task(task, [named]), "skip")


def test_languages_of_a_pattern_and_labels_in_order(tmp_path: Path) -> None:
    found = read_examples(load_task(make_task(tmp_path, "pairs"), []))
    assert (found.tests, found.labels) == (["de", "en"], ["0", "1"])
    assert set(found.sets["train"][0]) == {"text", "second", "label"}
    some = read_examples(load_task(tmp_path / "pairs/task.yaml", ["task.languages=[en]"]))
    assert some.tests == ["en"]
    with pytest.raises(UserError, match="task.lang=de.*|unknown key 'lang'"):
        load_task(tmp_path / "pairs/task.yaml", ["task.lang=de"])


def test_the_command_ends_with_one_line(tmp_path: Path, refused: Callable[..., str]) -> None:
    task = make_task(tmp_path, "classification")
    config = {**to_dict(tiny()), "name": "decoder"}
    decoder = write_checkpoint(tmp_path / "step_00000001", {}, vocabulary=48, config=config)

    def said(*more: str, checkpoint: Path = decoder) -> str:
        return refused("finetune", "--task", task, "--checkpoint", checkpoint, *more)

    assert "step_00000001: saved with model.architecture decoder; tasks need an encoder" in said()
    assert "no checkpoint and no run's folder" in said(checkpoint=tmp_path / "none")
    config = to_dict(tiny("model.architecture=encoder", "train.objective=masked", "model.vocab_size=null"))
    encoder = write_checkpoint(tmp_path / "step_00000002", {}, vocabulary=1025, config=config)
    assert "tokenizer: 'bytes' has 258 ids and is not that of the pretrained model" in said(
        checkpoint=encoder
    )
    assert "unknown key 'lr'" in said("task.lr=1")
    assert "expected section.key=value" in said("task.learning_rate")
    tree = yaml.safe_load(task.read_text())
    task.write_text(yaml.safe_dump({**tree, "train": str(tmp_path / "empty.jsonl")}))
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "empty.jsonl' has no examples; name another file" in said()


def test_missing_libraries_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from megamoe.apps.finetune.results import check_libraries

    check_libraries()
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(UserError, match="pip install 'megamoe.finetune.'"):
        check_libraries()


@pytest.mark.parametrize("path", sorted((ROOT / "examples/tasks").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_task_files(path: Path) -> None:
    assert load_task(path, []).name == path.stem


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(("name", "mark"), [("de.tsv", "\t"), ("de.csv", ",")])
def test_long_cells_and_every_end_of_line(tmp_path: Path, name: str, mark: str, end: str) -> None:
    text = "a" * 140_000
    (tmp_path / name).write_bytes(
        end.join([f"label{mark}text", f"no{mark}{text}", f"yes{mark}b", ""]).encode()
    )
    path = make_task(tmp_path, "classification", test={"de": str(tmp_path / name)})
    rows = read_examples(load_task(path, [])).sets["test.de"]
    assert [row["text"] for row in rows] == [text, "b"]
