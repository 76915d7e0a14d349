"""Preflight judges the nodes by majority, and a problem of all nodes is a mistake."""

import errno
import itertools
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.cluster import checks
from megamoe.apps.cluster.checks import (
    compute_problems,
    gpu_problems,
    limit_problems,
    node_problems,
    rounds_of_pairs,
    slow_ranks,
)
from megamoe.apps.cluster.preflight import NodeReport, compare_facts, judge
from megamoe.errors import ExitCode


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
def test_rounds_have_each_pair_once_and_each_rank_once_a_round(ranks: int) -> None:
    rounds = rounds_of_pairs(ranks, most=100)
    together = [pair for pairs in rounds for pair in pairs]
    assert sorted(together) == list(itertools.combinations(range(ranks), 2))
    for pairs in rounds:
        members = [rank for pair in pairs for rank in pair]
        assert len(members) == len(set(members))


def test_few_rounds_still_reach_every_rank() -> None:
    (pairs,) = rounds_of_pairs(1000, most=1)
    assert sorted(rank for pair in pairs for rank in pair) == list(range(1000))


def test_the_rank_that_slows_its_pairs_is_named() -> None:
    found = {pair: (1.0, 1.0) for pair in itertools.combinations(range(5), 2)}
    assert slow_ranks(found, 0.5) == {}
    for pair in found:
        if 3 in pair:
            found[pair] = (1.0, 0.2)
    assert slow_ranks(found, 0.5) == {3: "all-to-all at 0.20 GB/s, the median of all pairs is 1.00 GB/s"}
    assert slow_ranks({(0, 1): (0.1, 0.1)}, 0.5) == {}


def test_the_rank_that_differs_from_most_is_named_also_if_it_is_rank_0() -> None:
    usual = {"versions": {"torch": "2.13"}}
    odd = {"versions": {"torch": "2.12"}}
    expected = "torch is 2.12, on most nodes 2.13; install the same versions on all machines"
    assert compare_facts({0: odd, 1: usual, 2: usual}) == {0: expected}
    assert compare_facts({0: usual, 1: odd}) == {1: expected}
    assert compare_facts({0: usual, 1: dict(usual)}) == {}


def test_a_problem_of_one_node_is_the_nodes_and_one_of_all_is_a_mistake() -> None:
    well = judge({0: NodeReport("n1"), 1: NodeReport("n2")}, [], {})
    one = judge({0: NodeReport("n1"), 1: NodeReport("n2", ["full"])}, [], {})
    both = judge({0: NodeReport("n1", ["full"]), 1: NodeReport("n2", ["full"])}, [], {})
    gone = judge({0: NodeReport("n1")}, ["n2"], {})
    slow = judge({0: NodeReport("n1"), 1: NodeReport("n2")}, [], {1: "slow"})
    assert (well.code, well.bad) == (ExitCode.FINISHED, {})
    assert (one.code, one.bad) == (ExitCode.UNEXPECTED, {"n2": ["full"]})
    assert (both.code, both.bad, both.mistake) == (ExitCode.MISTAKE, {}, ["full"])
    assert gone.bad == {"n2": ["did not report within 25 s"]}
    assert slow.bad == {"n2": ["slow"]}


def test_a_disk_without_space_or_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_problems(tmp_path / "not/yet/there", 0, 2) == [*limit_problems(2), *gpu_problems()]
    (line,) = [it for it in node_problems(tmp_path, 1 << 60, 2) if it.startswith("output")]
    assert line.endswith("GiB for two checkpoints") and "expected 2147483648.0 GiB" in line

    def fail(handle: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", fail)
    expected = f"output disk {tmp_path}: Read-only file system; free some space or name another folder"
    assert expected in node_problems(tmp_path, 0, 2)
    assert list(tmp_path.iterdir()) == []


def test_many_ranks_need_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has a socket to each other rank, and the store's host two of each."""
    limits = {resource.RLIMIT_NOFILE: (1024, 4096)}  # a run raises the first to the second
    monkeypatch.setattr(checks.resource, "getrlimit", lambda number: limits.get(number, (1 << 40, 1 << 40)))
    assert [line for line in limit_problems(1024) if "ulimit" in line] == []
    assert "ulimit -Hn is 4096, expected at least 6656" in list(limit_problems(2048))


def smi(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> list[str]:
    """Return the problems of GPUs with a pretended nvidia-smi."""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    monkeypatch.setattr(checks.shutil, "which", lambda name: name)
    monkeypatch.setattr(checks.subprocess, "run", answer)
    return list(gpu_problems())


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(text: str, code: int = 0) -> Callable[..., Any]:
        return lambda command, **_: subprocess.CompletedProcess(command, code, text, "")

    def hangs(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 15)

    well = "0, H100, 4, 0\n1, H100, 4, [N/A]\n"
    assert smi(monkeypatch, answers(well)) == []
    bad = "0, H100, 70000, 3\n"
    assert smi(monkeypatch, answers(bad)) == [
        "1 GPUs, expected 2",
        "GPU 0 (H100) is in use: 70000 MiB",
        "GPU 0 (H100) has 3 uncorrected memory errors",
    ]
    assert smi(monkeypatch, answers("No devices\nx", 9)) == ["nvidia-smi failed: No devices"]
    assert smi(monkeypatch, hangs) == ["nvidia-smi did not answer within 15 s: a GPU or its driver hangs"]


def test_a_device_that_cannot_compute_or_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, ones = torch.device("cpu"), torch.ones
    assert list(compute_problems([cpu])) == []
    monkeypatch.setattr(torch, "ones", lambda *sizes, device: ones(*sizes, device=device) * 1.001)
    assert list(compute_problems([cpu])) == ["cpu computes a wrong product of two matrices"]

    def fails(*sizes: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA error:\nuncorrectable ECC error encountered")

    monkeypatch.setattr(torch, "ones", fails)
    expected = "cannot compute: CUDA error: uncorrectable ECC error encountered"
    assert list(compute_problems([cpu, cpu])) == 2 * [f"cpu {expected}"]
