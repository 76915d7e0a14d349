"""The tool on checkpoints: its files, the same numbers at any layout, bad input as a line."""

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megamoe.apps.evaluation.trained_model import session
from megamoe.apps.routing_analysis import command as analyze_routing
from megamoe.apps.routing_analysis import figures
from megamoe.apps.routing_analysis.study import ALONE, Options, _check_unpadded, study
from megamoe.config import load_config
from megamoe.errors import UserError
from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run

RUN: dict[str, Any] = {
    "moe__layers": {"at": [1, 2]},
    "moe__num_experts": 4,
    "moe__expert_activation": "gelu",
    "moe__router": {"scorer": "linear", "selector": {"name": "top_k", "k": 2}},
    "train__global_batch_size": 4,
    "evaluation__batches": 2,
    "checkpoint__keep": 4,
}
WORDS: dict[str, Any] = {"model__vocab_size": 24, "moe__expert_activation": "swiglu"}


def tool(*arguments: Any) -> tuple[int, str, str]:
    """Run the tool in this process; return the exit code, the output and the errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = analyze_routing.main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


def trained_runs(folder: Path) -> None:
    """Job: three runs; the first has two checkpoints, the last another number of words and SwiGLU."""
    for name, changes in (("a", {}), ("b", {"seed": 2}), ("words", WORDS)):
        trainer = Trainer(small_run(folder, name=name, **{**RUN, **changes}))
        for _ in range(2 if name == "a" else 1):
            trainer.step()
            trainer.save()
        trainer.saver.checkpoints.close()
    launch.stop()


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analysed")
    pool.run(trained_runs, folder, ranks=1)
    return folder


def mistakes_of(folder: Path) -> list[tuple[tuple[Any, ...], str]]:
    """Arguments of the tool, and how the line of their mistake begins."""
    run, other = folder / "a", folder / "words"
    step, words = f"{run}/checkpoints/step_00000002", f"{other}/checkpoints/step_00000001"
    output = f"{run}/routing/routing.json/in"
    return [
        ((folder / "none",), f"{folder}/none: no checkpoint and no run's folder with one"),
        (("seed=3",), "no checkpoint is named"),
        ((run, "--layers", "7"), f"{step}: layer 7 is no MoE layer; it has 1, 2"),
        ((run, "--layers", "x"), "--layers: found 'x', expected numbers such as 2,4"),
        ((run, "--analyses", "colapse"), "--analyses: found 'colapse', expected collapse, required,"),
        ((run, "--analyses", "fluctuation"), "--analyses fluctuation: one checkpoint is given, and two or"),
        ((run, "--threshold", "1.5"), "--threshold: found 1.5, expected 0 to 1"),
        ((run, "--tokens", "0"), "--tokens: found 0, expected at least 1"),
        ((run, "--set", "test"), "--set: no data set 'test'; expected one of valid"),
        ((run, "--data", "books"), "--data: found 'books', expected NAME=PREFIX"),
        ((run, other, "--analyses", "fluctuation"), f"{words}: vocabulary of 24 tokens, {step} has another"),
        ((other, "--analyses", "positive"), f"{words}: positive activations need experts with geglu, gelu,"),
        ((run, "model.vocab_size=42"), f"{step}: saved with vocabulary 21, this run has 42"),
        ((run, "--samples", "3", "train.micro_batch_size=2"), "3 samples do not divide"),
        ((run, "--analyses", "collapse", "--output", output), f"--output: {output} cannot be written: Not a"),
    ]


def tool_runs(folder: Path) -> tuple[tuple[int, str, str], list[tuple[int, str, str]]]:
    """Job: what the tool says to good arguments, and to bad ones."""
    figures.DPI = 20
    return tool(folder / "a", "--tokens", 40), [tool(*arguments) for arguments, _ in mistakes_of(folder)]


def several_runs(folder: Path) -> tuple[int, str, str]:
    """Job: what the tool says to several checkpoints."""
    steps = sorted((folder / "a/checkpoints").glob("step_*"))
    return tool(*steps, folder / "b", "--output", folder / "out", "--layers", "2")


@pytest.fixture(scope="module")
def outcome(pool: Pool, folder: Path) -> Any:
    (found,) = pool.run(tool_runs, folder, ranks=1)
    return found


def test_one_checkpoint(outcome: Any, folder: Path) -> None:
    code, output, errors = outcome[0]
    assert (code, errors) == (0, ""), errors
    assert f"8 files in {folder}/a/routing" in output and "representation collapse RC" in output
    results = json.loads((folder / "a/routing/routing.json").read_text())
    (checkpoint,) = results["checkpoints"]
    assert results["data"] == {"name": "valid", "samples": 8, "sampled_tokens": 40}
    assert (checkpoint["run"], checkpoint["step"], checkpoint["tokens"]) == ("a", 2, 8 * 32)
    assert checkpoint["analyses"].keys() == set(ALONE) and results["comparisons"] == {}
    for name in checkpoint["analyses"]:
        assert (folder / f"a/routing/{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "expert 3" in (folder / "a/routing/tokens.txt").read_text()


@pytest.mark.full
def test_several_checkpoints_are_compared(pool: Pool, folder: Path) -> None:
    ((code, _, errors),) = pool.run(several_runs, folder, ranks=1)
    assert (code, errors) == (0, "")
    results = json.loads((folder / "out/routing.json").read_text())
    (change,) = results["comparisons"]["fluctuation"]  # not between the two runs
    assert (change["earlier"], change["later"]) == ("a, step 1", "a, step 2")
    assert [*change["layers"]] == ["2"] and 0 <= change["layers"]["2"]["first"] < 1
    assert (folder / "out/fluctuation.png").exists()


def test_bad_input_is_a_line(outcome: Any, folder: Path) -> None:
    for (code, _, errors), (_, start) in zip(outcome[1], mistakes_of(folder), strict=True):
        assert errors.startswith(f"error: {start}") and errors.count("\n") == 1, (errors, start)
        assert code == 2, errors


def test_objectives_that_pad_are_refused(tmp_path: Path) -> None:
    """No router sees padding, so the places of the sampled tokens would be wrong."""
    for name, other in (("causal", "data.mock=true"), ("chat", "data.sources=[data/chat]")):
        config = load_config(None, [f"train.objective={name}", other, "data.document_aware=true"])
        trained: Any = SimpleNamespace(path=tmp_path, config=config)
        with (
            pytest.raises(UserError, match="sequences of train.objective chat end in padding; analyse")
            if name == "chat"
            else contextlib.nullcontext()
        ):
            _check_unpadded(trained)


def studied(path: Path, overrides: list[str], options: Options) -> dict[str, Any]:
    """Job: the analyses of a run's last checkpoint."""
    with session(overrides) as ranks:
        return study(ranks, [path], options)


def close(found: Any, expected: Any) -> None:
    """Whole numbers and text are equal, other numbers to rounding."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key in found:
            close(found[key], expected[key])
    elif isinstance(found, list):
        for one, other in zip(found, expected, strict=True):
            close(one, other)
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=2e-4)
    else:
        assert found == expected


def test_the_numbers_do_not_depend_on_expert_parallelism(pool: Pool, outcome: Any, folder: Path) -> None:
    first, _ = pool.run(studied, folder / "a", ["parallel.expert=2"], Options(tokens=40), ranks=2)
    alone = json.loads((folder / "a/routing/routing.json").read_text())
    close(json.loads(json.dumps(first)), alone)


@pytest.mark.full
def test_the_numbers_do_not_depend_on_tensor_parallelism(pool: Pool, folder: Path) -> None:
    options = Options(analyses=ALONE, tokens=100, thresholds=(0.5, 0.9))
    (alone,) = pool.run(studied, folder / "a", [], options, ranks=1)
    for layout in (["parallel.tensor=2", "parallel.expert=2"], ["parallel.expert_tensor=2"]):
        first, _ = pool.run(studied, folder / "a", layout, options, ranks=2)
        close(first, alone)
