"""The harness' model class on our checkpoints, and tools/lm_eval.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.evaluation.trained_model import session
from megamoe.apps.generation.generate import generate, tokenizer_of
from megamoe.apps.generation.sampling import Sampling
from megamoe.apps.lm_eval.scoring import Question
from megamoe.errors import UserError
from tests.apps.lm_eval.test_scoring import THRESHOLD, by_perplexity
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import trained_on_bytes
from tests.support.tiny import tool

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: pip install 'megamoe[eval]'")
ROOT = Path(__file__).parents[3]
TASKS = "python_choice,python_text,python_complete"
LONG = "def f(x):\n    return x\n" * 6  # several windows of the model's 64 tokens
NORMALIZED = {"until": ["\n", ""], "max_gen_toks": 5}  # what the harness always adds


@pytest.fixture(scope="module")
def run(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("harness")
    pool.run(trained_on_bytes, folder, {"small": {**THRESHOLD, "data__sequence_length": 64}}, ranks=1)
    return folder / "small"


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=number)
        for number, each in enumerate(arguments)
    ]


def asked(path: Path) -> None:
    """Job: each kind of request against our own perplexity and generation."""
    from megamoe.apps.lm_eval.model import Megamoe

    with session(["train.micro_batch_size=1"]) as ranks:
        trained = ranks.open(path)
        model = Megamoe(trained, batch_size=4)
        eod = tokenizer_of(trained).eod
        pairs = [("import ", "os"), ("", "class A:"), ("x = 1  ", "y"), ("def f(", "self):\n")]
        found = model.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
        for (context, continuation), (value, _) in zip(pairs, found, strict=True):
            text = (context + continuation).encode()
            kept = len(context.rstrip().encode())
            question = Question(list(text[:kept]) or [eod], list(text[kept:]))
            assert value == pytest.approx(by_perplexity(trained, question), abs=1e-5)
        texts = ["short", LONG]
        rolled = model.loglikelihood_rolling(requests("loglikelihood_rolling", *((t,) for t in texts)))
        assert rolled[0] == pytest.approx(by_perplexity(trained, Question([eod], list(b"short"))), abs=1e-5)
        tokens = list(LONG.encode())
        assert len(tokens) == 138  # windows: 64 tokens after the prefix, 64 after them, and the last 10
        windows = [Question([eod], tokens[:64]), Question(tokens[63:64], tokens[64:128])]
        windows += [Question(tokens[73:128], tokens[128:])]
        expected = sum(by_perplexity(trained, each) for each in windows)
        assert rolled[1] == pytest.approx(expected, abs=1e-4)
        options = {"until": ["\n"], "max_gen_toks": 5}
        generated = model.generate_until(
            requests("generate_until", ("a", options), ("import os", options), (LONG, options))
        )
        sampling = Sampling(max_tokens=5, temperature=0.0, stop=("\n",))
        prompts = [list(text.encode())[-59:] for text in ("a", "import os", LONG)]
        alone = [next(iter(generate(trained, [prompt], sampling, batch_size=1))) for prompt in prompts]
        assert generated == [result.text for result in alone]


@pytest.mark.full
def test_requests_get_our_own_numbers(pool: Pool, run: Path) -> None:
    pool.run(asked, run, ranks=1)


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({"do_sample": True, "top_p": 0.9}, 1.0),
        ({"do_sample": True, "temperature": 0.3}, 0.3),
        ({"do_sample": False, "top_k": 3}, 0.0),
    ],
)
def test_temperature(options: dict[str, Any], temperature: float) -> None:
    from megamoe.apps.lm_eval.model import sampling_of

    wanted = Sampling(5, temperature, options.get("top_k"), options.get("top_p"), stop=("\n",))
    assert sampling_of({**NORMALIZED, **options}) == wanted
    with pytest.raises(UserError, match="generation_kwargs: num_beams is not supported, expected do_sample"):
        sampling_of({**NORMALIZED, "num_beams": 3, "min_p": None})


def run_tool(path: Path, output: Path, *overrides: str) -> int:
    """Job: the tool on the example tasks."""
    options = [f"--include={ROOT / 'examples/lm_eval'}", f"--tasks={TASKS}", f"--json={output}"]
    code: int = tool("lm_eval").main([str(path), *options, "--limit=3", *overrides])
    return code


@pytest.mark.full
def test_the_tool_on_the_example_tasks_at_two_layouts(
    pool: Pool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for ranks, overrides in ((1, []), (2, ["parallel.expert=2"])):
        output = tmp_path / f"{ranks}.json"
        assert set(pool.run(run_tool, run, output, *overrides, ranks=ranks)) == {0}
        found.append(json.loads(output.read_text())["results"])
    one, two = found
    assert set(one) == set(TASKS.split(","))
    assert one["python_text"]["byte_perplexity,none"] == pytest.approx(
        two["python_text"]["byte_perplexity,none"], rel=1e-6
    )
    assert one["python_choice"]["acc,none"] == two["python_choice"]["acc,none"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--tasks=none"], "error: --tasks: 'none' is not known, expected some of broken, fine"),
        (["--tasks=,"], "error: --tasks: found none, expected some of broken, fine"),
        (["--tasks=broken"], "error: --tasks: broken cannot be loaded: "),
        (["--tasks=fine", "--include=nowhere"], "error: --include: nowhere is no folder; name one"),
        (["--tasks=fine", "--limit=0"], "error: --limit: found 0, expected at least 1"),
        (["--tasks=fine", "--num-fewshot=-1"], "error: --num-fewshot: found -1, expected at least 0"),
        (["--tasks=fine", "--json=no/out.json"], "error: --json: no/out.json cannot be written"),
        (["--tasks=fine"], "no_run"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    restored_process: None,
    options: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks").mkdir()
    Path("data.jsonl").write_text('{"text": "a"}\n')
    task = (
        "task: fine\ndataset_path: json\ndataset_kwargs: {data_files: data.jsonl}\ntest_split: train\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: byte_perplexity}]\n"
    )
    Path("tasks/fine.yaml").write_text(task)
    Path("tasks/broken.yaml").write_text(task.replace("fine", "broken").replace("data.jsonl", "absent.jsonl"))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    code = tool("lm_eval").main(["no_run", "--include=tasks", *options])
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out) == (2, "") and len(lines) == 1 and "Traceback" not in err, err
    assert expected in lines[0]
