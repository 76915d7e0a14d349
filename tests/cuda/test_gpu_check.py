"""`make gpu-check` on the pretended device: what it says of faults, and what is left of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.runs import OF_THE_CPU, ROOT, library_or_skip

SECTIONS = ("environment", "training", "kernels_sums", "attention", "collectives")
FAULTS = "training:memory,kernels_sums:compiler,attention:illegal,collectives:hang"


@pytest.mark.full
def test_faults_are_found_and_end_their_section_alone(tmp_path: Path) -> None:
    library_or_skip()
    variables = {name: value for name, value in os.environ.items() if name not in OF_THE_CPU}
    folders = [str(ROOT / "tests/cuda/rehearsal"), str(ROOT)]
    variables |= {"PYTHONPATH": os.pathsep.join(folders), "REHEARSED_FAULTS": FAULTS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/gpu_check.py", "--quick", "--minutes", "60"]
    command += ["--output", str(tmp_path), "--sections", ",".join(SECTIONS)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    sections = {each["name"]: each for each in json.loads((tmp_path / "report.json").read_text())["sections"]}
    assert list(sections) == list(SECTIONS)
    assert sections["environment"]["status"] == "measured"

    # Out of memory in the tuned setting: one line says so, and the default is still measured.
    training = sections["training"]["findings"]
    tuned = [each for each in training if each["name"].endswith("tuned")]
    assert tuned and all("CUDA out of memory" in each["value"] and not each["holds"] for each in tuned)
    assert any(each["name"].endswith("EP 1, default: step") for each in training)

    compiler = sections["kernels_sums"]
    assert compiler["status"] == "failed"
    assert "needs a C compiler" in compiler["findings"][0]["value"]

    # The process is gone; what it had found is there, and so is all that it printed.
    attention = sections["attention"]
    assert attention["status"] == "error"
    assert "illegal memory access" in attention["reason"]
    assert "illegal memory access" in (tmp_path / "logs/attention.log").read_text()

    hung = sections["collectives"]
    assert hung["status"] == "error"
    assert "not finished after" in hung["reason"]
    assert _with_output(tmp_path) == []


def _with_output(folder: Path) -> list[str]:
    """The command lines of processes that name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(str(folder) in word for word in words) and int(path.parent.name) != os.getpid():
            found.append(" ".join(words))
    return found
