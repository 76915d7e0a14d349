"""A signal to any rank makes all ranks save and end together, with its exit code."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megamoe.config import dump_yaml
from megamoe.errors import ExitCode
from megamoe.parallel.launch import free_port
from megamoe.train.trainer import Trainer
from tests.support.ranks.entry_script import run_entry_script
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ROOT
from tests.support.tiny import tiny

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_", "TORCHELASTIC_")
# Says which process is which rank, and takes its time to save.
PLUGIN = """
import os, pathlib, time
from megamoe.train.trainer import Trainer
here = pathlib.Path(__file__).parent
(here / f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))
save = Trainer.begin_save
def slowly(self):
    (here / "saving").touch()
    time.sleep(3)
    return save(self)
Trainer.begin_save = slowly
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ALL_SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]


def tell_rank_1(trainer: Trainer) -> None:
    """Send the signal, and again during the save."""
    if trainer.progress.step == 2 and trainer.world.rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
        save = trainer.begin_save

        def told_again() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            save()

        trainer.begin_save = told_again  # type: ignore[method-assign]


def test_a_signal_to_one_rank_makes_all_save_and_end(pool: Pool, tmp_path: Path) -> None:
    found = run_entry_script(pool, tmp_path, "data.workers=1", fault=tell_rank_1)
    assert found.codes == [ExitCode.STOPPED, ExitCode.STOPPED]
    assert found.errors() == [[], []]
    assert "stopping after step 3: another rank received a signal; go on with --resume" in found.outputs[0]
    assert (tmp_path / "runs/a/checkpoints/latest").read_text() == "step_00000003"
    assert len(list((tmp_path / "runs/a/checkpoints/step_00000003").glob("shard_*"))) == 2


class Launched:
    """The entry script under a launcher, in a separate folder."""

    def __init__(self, folder: Path, command: list[str], *arguments: str) -> None:
        self.folder = folder
        (folder / "plugin.py").write_text(PLUGIN)
        (folder / "run.yaml").write_text(dump_yaml(tiny(f"output={folder}", "name=a", "train.steps=100000")))
        script = [str(ROOT / "pretrain_gpt_moe.py"), "--config", str(folder / "run.yaml")]
        mine = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        environment = {**mine, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        port = "--master_port" if "deepspeed" in command[2] else "--master-port"
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [*command, port, str(free_port()), *script, "plugins=[plugin.py]", *arguments],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, path: str) -> None:
        until = time.monotonic() + 120
        while not (self.folder / path).is_file() or not (self.folder / path).stat().st_size:
            assert time.monotonic() < until and self.process.poll() is None, self.output()
            time.sleep(0.05)

    def send(self, number: int, target: str) -> None:
        """Send a signal to the launcher, or to a rank by its number."""
        launcher = target == "launcher"
        os.kill(self.process.pid if launcher else int((self.folder / f"pid_{target}").read_text()), number)

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def end(self) -> int:
        try:
            return self.process.wait(60)
        finally:
            for file in self.folder.glob("pid_*"):
                if Path(f"/proc/{file.read_text()}").exists():
                    os.kill(int(file.read_text()), signal.SIGKILL)
            self.process.kill()


def assert_saved(launched: Launched) -> None:
    """Once, by both ranks."""
    folder = launched.folder / "a" / "checkpoints"
    steps = [path.name for path in folder.iterdir() if path.name != "latest"]
    assert [(folder / "latest").read_text()] == steps, launched.output()


def assert_ranks_end(launched: Launched) -> None:
    """Soon, and without a word of an error."""
    until = time.monotonic() + 20
    pids = [(launched.folder / f"pid_{rank}").read_text() for rank in (0, 1)]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, launched.output()
        time.sleep(0.1)
    assert not re.search("^(error: |\\[rank)", launched.output(), flags=re.MULTILINE), launched.output()


full = pytest.mark.full
one_gpu = torch.cuda.device_count() == 1
gpu = pytest.mark.skipif(one_gpu, reason="a launcher shows its ranks the devices again")
# Command, signals in their order, to whom, the launcher's exit code.
CASES = {
    "torchrun, twice": (TORCHRUN, ["TERM", "TERM"], "launcher", 1),
    "torchrun, of one rank": (TORCHRUN, ["TERM"], "1", 1),
    "torchrun, with SIGUSR1": ([*TORCHRUN, ALL_SIGNALS], ["USR1"], "launcher", 1),
    "torchrun, killed by SIGUSR1": (TORCHRUN, ["USR1"], "launcher", -signal.SIGUSR1),
    "torchrun, killed": (TORCHRUN, ["KILL"], "launcher", -signal.SIGKILL),
    "deepspeed, of one rank": (DEEPSPEED, ["TERM"], "1", ExitCode.STOPPED),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[full] if case == "torchrun, twice" else [full, gpu]) for case in CASES]
)
def test_ranks_save_when_their_launcher_gets_a_signal(tmp_path: Path, case: str) -> None:
    command, signals, target, expected = CASES[case]
    launched = Launched(tmp_path, command)
    try:
        launched.wait_for("a/metrics.jsonl")
        for place, name in enumerate(signals):
            if place:
                while not (tmp_path / "saving").exists():
                    time.sleep(0.05)
            launched.send(signal.Signals[f"SIG{name}"], target)
        assert launched.process.wait(60) == expected, launched.output()
        assert_ranks_end(launched)
        assert_saved(launched)
    finally:
        launched.end()


@pytest.mark.full
@pytest.mark.parametrize("delay_s", [0.2, 1.5, 3.0])
def test_a_signal_during_the_start_leaves_nothing_half_written(tmp_path: Path, delay_s: float) -> None:
    launched = Launched(tmp_path, TORCHRUN)
    try:
        launched.wait_for("pid_1")
        time.sleep(delay_s)
        launched.send(signal.SIGTERM, "launcher")
        assert launched.process.wait(60) == 1
        assert_ranks_end(launched)
        left = {path.name for path in (tmp_path / "a").iterdir()} if (tmp_path / "a").exists() else None
        assert left is None or "config.yaml" in left
    finally:
        launched.end()
