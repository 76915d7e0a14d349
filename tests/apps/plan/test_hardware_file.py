"""GPUs by name and by a file of their rates, and what is told of a wrong file."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from megamoe.apps.plan.hardware import gpu_of
from megamoe.errors import UserError
from megamoe.metrics.gpus import GPUS, Gpu
from tests.support.refusals import Case, cases, told

OWN = {"name": "My GPU", "bf16": 1e15, "fp32": 6e13, "memory": 3e12, "nvlink": 4e11, "network": 5e10}


def test_gpus_have_names() -> None:
    assert {name: gpu_of(name) for name in ("h100", "h200", "b200", "a100", "mi300x")} == GPUS


def test_a_file_has_the_rates_of_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({**OWN, "capacity": 80_000_000_000}))
    assert gpu_of(str(path)) == Gpu(**OWN, capacity=8e10)  # type: ignore[arg-type]
    for gpu in GPUS.values():
        path.write_text(json.dumps(asdict(gpu)))
        assert gpu_of(str(path)) == gpu


@pytest.mark.parametrize("case", cases("plan", "gpu: "))
def test_a_wrong_file_is_told(tmp_path: Path, case: Case, expect_message: Callable[..., None]) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(case["gpu"])
    expect_message(case, told(lambda: gpu_of(str(path))))


@pytest.mark.parametrize("content", [None, "{", "\udcff", "[" * 5000])
def test_what_is_no_gpu_is_told(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "gpu.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError) as error:
        gpu_of(str(path))
    said = f"--gpu: found {str(path)!r}, expected one of {', '.join(GPUS)}, or a JSON file: "
    assert str(error.value).startswith(said)
