"""A checkpoint's perplexity: what training reports, at any layout; the experts' FLOPs by hand."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.command import check_writable
from megamoe.apps.evaluation.perplexity import Perplexity, perplexity_on, validation_sets
from megamoe.apps.evaluation.trained_model import session
from megamoe.errors import UserError
from megamoe.model.size import dense_ffn_products, layer_products
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_config, small_run
from tests.support.tiny import tiny, tool

CAPACITY = {"name": "per_expert", "factor": 0.5}
ROUTER: dict[str, Any] = {"scorer": "linear", "selector": {"name": "top_k", "k": 2}, "capacity": CAPACITY}
RUN: dict[str, Any] = {
    "moe__router": ROUTER,
    "train__global_batch_size": 4,
    "evaluation__batches": 2,
    "data__validation": {},
}
PAIR: dict[str, Any] = {"tensor": 2, "expert": 2, "deepspeed": ds_config("zero3_fp32")}


def trained_run(folder: Path, **changes: Any) -> dict[str, float]:
    """Job: two steps, a checkpoint, and the validation losses that training reports."""
    trainer = Trainer(small_run(folder, **changes))
    for _ in range(2):
        trainer.step()
    reported = trainer.evaluate()
    trainer.save()
    trainer.close()
    return reported


def evaluated(
    path: Path, points: list[list[str]], overrides: list[str], names: tuple[str, ...] = ("valid",)
) -> list[dict[str, Any]]:
    """Job: what an evaluation finds at each point, on the named sets."""
    found = []
    with session(overrides, replays=True) as ranks:
        for point in points:
            trained = ranks.open(path, point, ("decoder", "encoder_decoder"))
            samples = trained.validation_samples
            sets, _ = validation_sets(trained, samples)
            found += [perplexity_on(trained, sets[name], samples, name).as_data() for name in names]
    return found


@pytest.fixture(scope="module")
def run_folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run trained on two ranks at TP 2 x EP 2 and ZeRO 3, and its validation loss."""
    folder = tmp_path_factory.mktemp("evaluated")
    changes = {**RUN, "parallel": PAIR, "log__routing": str(folder / "record")}
    reported, _ = pool.run(trained_run, folder, **changes, ranks=2)
    return folder / "small", reported["val/lm_loss"]


def test_the_loss_is_the_one_that_training_reports_at_any_layout(
    pool: Pool, run_folder: tuple[Path, float]
) -> None:
    path, reported = run_folder
    (alone,) = pool.run(evaluated, path, [[]], [], ranks=1)
    one, two = pool.run(evaluated, path, [[]], ["parallel.expert=2"], ranks=2)
    assert one[0]["lm_loss"] == two[0]["lm_loss"]
    assert alone[0]["lm_loss"] == pytest.approx(reported, abs=1e-6)
    assert one[0]["lm_loss"] == pytest.approx(reported, abs=1e-6)
    for word in ("load", "dropped", "experts_per_token", "dense_share", "tokens"):
        assert one[0][word] == alone[0][word], word


def test_a_sweep_over_the_capacity_changes_what_is_computed(
    pool: Pool, run_folder: tuple[Path, float]
) -> None:
    path, _ = run_folder
    points = [[f"moe.router.capacity.eval_factor={factor}"] for factor in (0.25, 0.5, 8)]
    (found,) = pool.run(evaluated, path, points, [], ranks=1)
    # Of 32 tokens with 2 choices and 8 experts, a factor of 0.25 leaves 2 places an expert: 16 of 64 pairs.
    assert found[0]["experts_per_token"] <= 0.5
    assert found[0]["dense_share"] < found[1]["dense_share"] < found[2]["dense_share"]
    assert found[2]["dropped"] == 0 and found[2]["experts_per_token"] == 2
    # Two experts of FFN size 32 beside a dense FFN of 64.
    assert found[2]["dense_share"] == 1.0
    assert len({each["lm_loss"] for each in found}) == 3


def test_replayed_choices_give_the_loss_of_the_recorded_run_under_another_router(
    pool: Pool, run_folder: tuple[Path, float]
) -> None:
    """The capacity, which drops pairs, is of the recorded run: the override keeps it."""
    path, reported = run_folder
    select_four = "moe.router.selector.k=4"
    replay = f"moe.router.replay={path.parent / 'record'}"
    capacity = "moe.router.capacity.factor=0.25"  # of k = 4 as many places as half of k = 2
    points = [[replay], [select_four, capacity, replay], [select_four, capacity]]
    (alone,) = pool.run(evaluated, path, points, [], ranks=1)
    assert alone[0]["lm_loss"] == pytest.approx(reported, abs=1e-6)
    assert alone[1]["load"] == alone[0]["load"] and alone[1]["lm_loss"] == alone[0]["lm_loss"]
    assert alone[2]["load"] != alone[0]["load"]
    one, two = pool.run(evaluated, path, points[1:2], ["parallel.expert=2"], ranks=2)
    assert one[0]["lm_loss"] == two[0]["lm_loss"] == pytest.approx(reported, abs=1e-6)
    assert one[0]["load"] == alone[0]["load"]


def swept(path: Path, sweeps: list[str], overrides: list[str]) -> tuple[int, str, int]:
    """Job: the exit code of a sweep, the errors, and how many evaluations it has done."""
    evaluate, done, told = tool("evaluate"), [], io.StringIO()
    evaluate._show = lambda row, further, first: done.append(row)
    target = path.parent / "swept.json"
    target.unlink(missing_ok=True)
    written = evaluate.write_text

    def write(option: str, file: Path, text: str) -> None:
        written(option, file, text)
        assert json.loads(file.read_text()) == done, "the file has what is done so far"

    evaluate.write_text = write
    with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
        arguments = [f"--sweep={sweep}" for sweep in sweeps]
        code = evaluate.main([str(path), *arguments, f"--json={target}", *overrides])
    assert len(done) == (len(json.loads(target.read_text())) if target.exists() else 0)
    return code, told.getvalue(), len(done)


def test_a_sweep_is_checked_before_its_first_evaluation(pool: Pool, run_folder: tuple[Path, float]) -> None:
    path, _ = run_folder
    replay = [f"moe.router.replay={path.parent / 'record'}"]
    key = "moe.router.selector"
    (late,) = pool.run(swept, path, [f"{key}.k=2,99"], [], ranks=1)
    assert late[0] == 2 and "99" in late[1] and late[1].count("\n") == 1 and late[2] == 0
    (idle,) = pool.run(swept, path, [f"{key}.k=2,3"], replay, ranks=1)
    assert idle[0] == 2 and f"--sweep: {key}.k has no effect on the choices" in idle[1] and idle[2] == 0
    (works,) = pool.run(swept, path, [f"{key}.scale=1,2"], replay, ranks=1)
    assert (works[0], works[2]) == (0, 2), works[1]


@pytest.mark.parametrize("kind", ["evaluate", "generate", "analyze_routing"])
def test_an_interrupt_of_a_tool_gives_no_advice_on_training(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], restored_process: None
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megamoe.apps.command.check_versions", interrupted)
    arguments = {"generate": ["run", "--prompt=a"], "analyze_routing": ["run", "--output=x"]}
    assert tool(kind).main(arguments.get(kind, ["run"])) == 130
    assert capsys.readouterr().err == "interrupted\n"


def refusals(path: Path, cases: list[tuple[list[str], int, str]]) -> list[str]:
    """Job: the lines of what cannot be evaluated."""
    lines = []
    for overrides, samples, _ in cases:
        try:
            with session(overrides, replays=True) as ranks:
                trained = ranks.open(path)
                perplexity_on(trained, validation_sets(trained, 8)[0]["valid"], samples)
        except UserError as error:
            lines.append(str(error))
    return lines


def test_mistakes_are_lines(pool: Pool, run_folder: tuple[Path, float], tmp_path: Path) -> None:
    path, _ = run_folder
    step, record = f"{path}/checkpoints/step_00000002", path.parent / "record"
    key = "moe.router.replay"
    replay, of = f"{key}={record}", f"{key}: {record} is a record of"
    cases = [
        (["model.vocab_size=42"], 8, f"{step}: saved with vocabulary 21, this run has 42; name data"),
        (["moe.num_experts=4"], 8, f"{step}: "),
        ([], 0, "0 samples do not divide"),
        ([replay, "seed=7"], 8, f"{of} seed 1234, this run has 7; name a record"),
        ([replay, "data.document_aware=false"], 8, f"{of} data.document_aware true, this run has false;"),
        ([replay], 4, f"{key}: {record} has 8 samples of val at step 2, this evaluation takes 4; leave out"),
        ([f"{key}={tmp_path}"], 8, f"{key}: {tmp_path} holds no record; expected the folder of log.routing"),
        (["log.routing=new"], 8, "log.routing: found 'new', but only training records; leave it out"),
    ]
    (lines,) = pool.run(refusals, path, cases, ranks=1)
    for line, (_, _, start) in zip(lines, cases, strict=True):
        assert line.startswith(start), line


def test_a_result_that_cannot_be_written_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_writable("--json", tmp_path / "out.json")
    check_writable("--json", None)
    for place, problem in (("file/out.json", "Not a directory"), (".", "Is a directory")):
        with pytest.raises(UserError, match=rf"^--json: .* cannot be written: {problem}"):
            check_writable("--json", tmp_path / place)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_checkpoint_trained_in_fp8_is_read_without(tmp_path: Path) -> None:
    """Batches of any length have rows that FP8 products do not take."""
    from megamoe.apps.evaluation.trained_model import configuration_of, without_fp8
    from megamoe.config import to_dict

    config = tiny("model.fp8=delayed", "model.fp8_format=e4m3", "model.fp8_amax_history=16")
    meta: Any = {"config": to_dict(config), "step": 3}
    found = configuration_of(without_fp8(meta), Path("runs/a"), []).model
    assert (found.fp8, found.fp8_format, found.fp8_amax_history) == ("none", None, None)
    assert meta["config"]["model"]["fp8"] == "delayed"


def test_plugins_of_a_checkpoint_are_not_run_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megamoe.apps.evaluation.trained_model import configuration_of
    from megamoe.config import to_dict

    mark = tmp_path / "ran"
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"open({str(mark)!r}, 'w')\n")
    meta: Any = {"config": {**to_dict(tiny()), "plugins": [str(plugin)]}}
    with pytest.raises(
        UserError, match=r"^runs/a: the model was trained with plugins=\['.*'\], which are run"
    ):
        configuration_of(meta, Path("runs/a"), [])
    assert not mark.exists()
    configuration_of(meta, Path("runs/a"), [f"plugins={json.dumps([str(plugin)])}"])
    assert mark.exists()


def test_products_by_hand() -> None:
    # SwiGLU: three matrices of 16 x 12, a product for each weight; the dense FFN is 24 wide.
    assert layer_products(tiny())[1] == 3 * 16 * 12
    assert dense_ffn_products(tiny().model) == 3 * 16 * 24
    assert layer_products(tiny("moe.expert_activation=gelu"))[1] == 2 * 16 * 12


def test_the_page_has_every_key_of_the_json() -> None:
    page = (Path(__file__).parents[3] / "docs/models/evaluate.md").read_text()
    rows = [row[1:].split(" | ") for row in page.splitlines() if row.startswith("|") and row.count("|") == 4]
    named = {name.strip("`") for row in rows[2:] for name in row[1].strip().split(", ")} - {
        "accuracy",
        "squared_error",
    }
    fields = {each.name for each in dataclasses.fields(Perplexity)} - {"load_LE", "further"}
    assert named == {"data", "settings", "samples", "load", *fields}
