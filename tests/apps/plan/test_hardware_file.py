"""GPUs by name and by a file of their rates, and what is told of a wrong file."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megamoe.apps.plan.hardware import gpu_of
from megamoe.errors import UserError
from megamoe.metrics.gpus import GPUS, Gpu

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


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (OWN, "capacity is missing; expected"),
        ({**OWN, "capacity": 8e10, "tf32": 1e14}, "tf32 is not a key; expected"),
        ({**OWN, "capacity": 0}, "capacity: found 0, expected"),
        ({**OWN, "capacity": True}, "capacity: found True, expected"),
        ({**OWN, "capacity": "80 GB"}, "capacity: found '80 GB', expected"),
        ({**OWN, "capacity": float("nan")}, "capacity: found nan, expected"),
        ([OWN], "expected"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, found: Any, said: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(found))
    with pytest.raises(UserError) as error:
        gpu_of(str(path))
    assert str(error.value).startswith(f"--gpu: {path}: {said} name and, as numbers above 0, bf16, fp32")


@pytest.mark.parametrize("content", [None, "{", "\udcff", "[" * 5000])
def test_what_is_no_gpu_is_told(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "gpu.json"
    if content is not None:
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError) as error:
        gpu_of(str(path))
    said = f"--gpu: found {str(path)!r}, expected one of {', '.join(GPUS)}, or a JSON file: "
    assert str(error.value).startswith(said)
