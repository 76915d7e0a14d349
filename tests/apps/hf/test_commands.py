"""The commands of docs/models/hugging_face.md, one after the other, as a reader would run them."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.apps.hf_models import TEXT, make, with_tokenizer

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[3]
DOCUMENTS = 100


def commands_of(page: str) -> list[str]:
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line for line in block.splitlines() if line.strip()]


def run(command: str, folder: Path) -> str:
    """Run a command in a folder that has no clone: the scripts and the text stand for those of the page."""
    program, script, *arguments = command.split()
    assert program == "python"
    arguments = ["text.jsonl" if argument == "--stdlib" else argument for argument in arguments]
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.full
def test_the_commands_run(tmp_path: Path) -> None:
    import transformers

    make("qwen3_moe", tmp_path / "models/small")
    with_tokenizer(tmp_path / "models/small")
    (tmp_path / "text.jsonl").write_text(f"{json.dumps({'text': TEXT})}\n" * DOCUMENTS, encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in commands_of("docs/models/hugging_face.md"):
        if "lm_eval.py" in command and find_spec("lm_eval") is None:  # the extra `eval`
            continue
        assert "|python_choice|" in run(command, tmp_path) or "lm_eval.py" not in command
    exported = tmp_path / "exported"
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert tokenizer.eos_token == "<eos>" and tokenizer("the river")["input_ids"]
    assert (exported / "generation_config.json").exists()
    text = run("python tools/generate.py runs/small --prompt the --max-tokens 3", tmp_path)
    assert "the" in text
