"""A preparation that is killed again and again ends with the bytes of one that is left alone."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megamoe.apps.prepare.verify import verify_in_full

ROOT = Path(__file__).resolve().parents[3]
ENDINGS = (".bin", ".idx", ".counts.npy", ".card.json")
KILLS = 20

# Prepares argv[1] to argv[2] by 2 workers in small parts; says so when the imports are done.
PREPARE = """
import sys
from megamoe.apps.prepare import prepare as module
if __name__ == "__main__":
    module.PART_BYTES = 200_000
    print("ready", flush=True)
    module.prepare(module.Preparation(sys.argv[2], [sys.argv[1]], workers=2, progress=False, overwrite=True))
"""


def make_corpus(path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra parquet is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    draw = np.random.default_rng(3)
    texts = ["".join(map(chr, draw.integers(97, 123, n))) for n in draw.integers(20, 4000, 6000)]
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=100, use_dictionary=False)


def start(script: Path, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.full
def test_random_kills_of_workers_and_parent(tmp_path: Path) -> None:
    """Every other kill is of one worker alone. What a kill leaves is found again by the next run."""
    make_corpus(tmp_path / "in.parquet")
    script, corpus = tmp_path / "prepare.py", str(tmp_path / "in.parquet")
    script.write_text(PREPARE)
    begun = time.monotonic()
    whole = start(script, corpus, str(tmp_path / "whole"))
    assert whole.wait(600) == 0
    duration = time.monotonic() - begun
    draw, kills = random.Random(11), 0
    partial, records = tmp_path / ".out.partial", 0
    while kills < KILLS:
        process = start(script, corpus, str(tmp_path / "out"))
        try:
            # Mostly early, so that parts are left for all of the kills.
            process.wait(draw.random() ** 3 * duration / 2)
            assert process.stderr is not None
            assert process.returncode == 0, process.stderr.read()[-2000:]
        except subprocess.TimeoutExpired:
            kills += 1
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if kills % 2 and len(children) > 1:
                os.kill(int(children[-1]), signal.SIGKILL)
                time.sleep(0.2)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
        if (tmp_path / "out.card.json").exists():  # finished early: once more, from the beginning
            for ending in ENDINGS:
                same_bytes(tmp_path, ending)
                Path(f"{tmp_path}/out{ending}").unlink()
            shutil.rmtree(partial, ignore_errors=True)
            records = 0
        else:
            found = len(list((partial / "parts").glob("*.json")))
            assert found >= records - 2, "no more than the parts on their way were lost"
            records = found
    process = start(script, corpus, str(tmp_path / "out"))
    assert process.wait(600) == 0
    for ending in ENDINGS:
        same_bytes(tmp_path, ending)
    verify_in_full(str(tmp_path / "out"))
    assert json.loads((tmp_path / "out.card.json").read_text())["documents"] == 6000


def same_bytes(folder: Path, ending: str) -> None:
    assert Path(f"{folder}/out{ending}").read_bytes() == Path(f"{folder}/whole{ending}").read_bytes()
