"""A small checkpoint made by hand: every kind of tensor, cut and whole, in two shards."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.checkpoint_files import META, Chunk, grid, write_checkpoint

META_CONTENT: dict[str, Any] = {
    "saved_at": "2026-01-01T00:00:00+00:00",
    **{"samples": 56, "micro_batches": 28, "tokens": 448, "vocabulary": 12},
    "layout": {**META["layout"], "ranks": 2, "expert": 2, "zero_stage": 1},
    "config": {
        "name": "by_hand",
        "model": {"num_attention_heads": 4},
        "parallel": {"tensor": 1, "expert": 2, "expert_tensor": 1, "sequence": False},
    },
}
SHARDINGS: dict[str, Any] = {
    "embedding": {"tensor": [0, 1]},
    "fc1": {"tensor": [0, 2]},
    "norm": {},
    "up": {"expert": True, "slices": [1, 2]},
    "down": {"expert": True, "slices": [2, 1]},
}
SHAPES = {"embedding": (12, 4), "fc1": (16, 4), "norm": (5,), "up": (4, 8, 4), "down": (4, 4, 4)}


def tensors() -> dict[str, Tensor]:
    """Every tensor, whole."""
    found: dict[str, Tensor] = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        found |= {f"model/{name}": values, f"exp_avg/{name}": values / 3, f"exp_avg_sq/{name}": values**2}
        found[f"step/{name}"] = torch.tensor(7.0)
    found["model/bias"] = torch.linspace(0, 1, 4, dtype=torch.float64)
    found["model/table"] = torch.arange(6).reshape(2, 3)
    return found | {f"random/0000{rank}/torch": torch.arange(8).to(torch.uint8) + rank for rank in range(2)}


def write(folder: Path, step: int = 7) -> Path:
    """A valid checkpoint: tensors of two dimensions and more are cut in two along the first."""
    chunks: dict[str, list[Chunk]] = {}
    for number, (name, tensor) in enumerate(tensors().items()):
        cut = grid(tuple(tensor.shape), 2 if tensor.dim() > 1 else 1)
        chunks[name] = cut if len(cut) > 1 else [(number % 2, *cut[0][1:])]
    return write_checkpoint(folder, tensors(), chunks=chunks, shardings=SHARDINGS, **META_CONTENT, step=step)


def load(path: Path) -> Any:
    """JSON of a file."""
    return json.loads(path.read_text())


def dump(path: Path, content: Any) -> None:
    """JSON into a file."""
    path.write_text(json.dumps(content))
