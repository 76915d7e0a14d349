"""A pipeline of datatrove on Slurm: the tasks of both nodes give the bytes of a pool of processes."""

import os
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.support.data.datatrove_inputs import contents, environment, make_lines, run_pipeline

pytest.importorskip("datatrove", reason="the extra datatrove is not installed")


def test_two_nodes_give_the_bytes_of_a_pool(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.folder / "slurm.conf"))
    make_lines(tmp_path / "in")
    run_pipeline(tmp_path, "local")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = f"export PATH={path} PYTHONPATH={environment()['PYTHONPATH']}"
    run_pipeline(tmp_path, "slurm", "partition=batch", f"env={command}")
    cluster.wait((tmp_path / "slurm.card.json").exists, "the merged dataset")
    assert contents(tmp_path / "slurm") == contents(tmp_path / "local")
