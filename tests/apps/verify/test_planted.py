"""`megamoe verify` notices planted faults of layouts, and names a tensor or a metric."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted_faults import FAULTS, copy_of_code, planted

JITTER = "moe.router.scorer.jitter=0.1"
# By fault: a part of the layout's line, and overrides of the demo that the promise is about.
NOTICED: dict[str, tuple[str, ...]] = {
    "tensor-sync": ("2 ranks, TP 2",),
    "draws": ("2 ranks, EP 2", JITTER),
    "aux-scale": ("2 ranks, TP 2",),
    "token-count": ("2 ranks, ZeRO 1", "data.document_aware=true"),
    "expert-slices": ("2 ranks, ETP 2",),
    "by-node-forward": ("by_node",),
    "by-node-backward": ("by_node",),
    "muon-slices": ("2 ranks, ZeRO 1", "optimizer.name=muon"),
    "muon-momentum": ("2 ranks, ZeRO 1", "optimizer.name=muon"),
    "ema-restored": ("2 ranks, ZeRO 1", "optimizer.ema=0.5"),
    "resume-position": ("2 ranks, ZeRO 1",),
    "clipping": ("2 ranks, EP 2", "optimizer.grad_clip=0.1"),
    "routing-metrics": ("2 ranks, EP 2",),
    "stage-context": ("model.recompute", "parallel.pipeline=2", "model.recompute=full", JITTER),
    "tied-stages": ("2 ranks, PP 2",),
    "stages-norm": ("2 ranks, PP 2",),
    "turn-recomputed": (
        "in_flight 2",
        "parallel.expert=2",
        "train.in_flight=2",
        JITTER,
        "model.recompute=full",
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_code(tmp_path_factory.mktemp("planted") / "code")


@pytest.mark.full
@pytest.mark.parametrize("name", NOTICED)
def test_a_fault_of_layouts_is_noticed(copy: Path, name: str) -> None:
    [fault] = [fault for fault in FAULTS if fault.name == name]
    only, *overrides = NOTICED[name]
    original = (copy / fault.file).read_text(encoding="utf-8")
    (copy / fault.file).write_text(planted(fault, original), encoding="utf-8")
    command = [sys.executable, "-m", "megamoe", "verify", "--config", "examples/demo.yaml", "--only", only]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        found = subprocess.run(
            [*command, *overrides], cwd=copy, env=environment, capture_output=True, text=True, check=False
        )
    finally:
        (copy / fault.file).write_text(original, encoding="utf-8")
    assert found.returncode == 1, found.stdout + found.stderr
    assert "DIFFERS" in found.stdout
