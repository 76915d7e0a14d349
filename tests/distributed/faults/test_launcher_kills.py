"""A launcher that is killed (kill -9) at any moment of its ranks' start leaves none of them alive."""

import base64
import json
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.distributed.faults.test_signals import TORCHRUN, Launched

MARK = "MEGAMOE_TEST_LAUNCH"
RANKS = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
# The part of the deepspeed launcher that is the ranks' parent.
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={RANKS}"]
LIMIT_S = 8  # in training a rank writes a checkpoint before it ends
KILLS = 10
moments = random.Random(20)
CASES = [(launcher, moments.uniform(0, 10)) for _ in range(KILLS) for launcher in ("torchrun", "deepspeed")]


def marked(mark: str) -> dict[int, str]:
    """Return the running processes with `mark` in their environment: pid -> command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="a launcher shows its ranks the devices again"),
]


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A mark in the environment of all processes of the test, which are killed at its end."""
    monkeypatch.setenv(MARK, text := uuid.uuid4().hex)
    yield text
    for pid in marked(text):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def assert_all_end(mark: str, launched: Launched) -> None:
    until = time.monotonic() + LIMIT_S
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, launched.output()


@pytest.mark.parametrize(("launcher", "delay_s"), CASES, ids=[f"{name}-{s:.1f}s" for name, s in CASES])
def test_no_rank_outlives_a_killed_launcher(tmp_path: Path, mark: str, launcher: str, delay_s: float) -> None:
    launched = Launched(tmp_path, TORCHRUN if launcher == "torchrun" else DEEPSPEED)
    time.sleep(delay_s)
    launched.send(signal.SIGKILL, "launcher")
    launched.process.wait()
    assert_all_end(mark, launched)


# Rank 0 kills the launcher at one place of its start, to which rank 1 comes half a second later.
PLACES = {
    "rendezvous": "from megamoe.parallel import launch as where; name = 'start'",
    "groups": "from megamoe.train import trainer as where; name = 'start_groups'",
    "signals are heard": "from megamoe.resilience.stopping import StopRule as where; name = 'listen'",
    "first step": "from megamoe.train.trainer import Trainer as where; name = 'step'",
}
KILLS_ITS_PARENT = """
import os, time, pathlib
{place}
before = getattr(where, name)
def killing(*args, **kwargs):
    if os.environ["RANK"] == "1":
        time.sleep(0.5)
    result = before(*args, **kwargs) if name == "listen" else None
    if os.environ["RANK"] == "0":
        (pathlib.Path(__file__).parent / "killed").touch()
        os.kill(os.getppid(), 9)
    return before(*args, **kwargs)
setattr(where, name, killing)
"""


@pytest.mark.parametrize("place", PLACES)
def test_at_every_point_of_the_start(tmp_path: Path, mark: str, place: str) -> None:
    """One rank may hear signals already, and wait for the end of a step, while they still end the other."""
    (tmp_path / "kills.py").write_text(KILLS_ITS_PARENT.format(place=PLACES[place]))
    launched = Launched(tmp_path, TORCHRUN, "plugins=[kills.py]")
    assert launched.process.wait(120) == -signal.SIGKILL
    assert (tmp_path / "killed").exists()
    assert_all_end(mark, launched)
