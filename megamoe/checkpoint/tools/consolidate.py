"""A checkpoint's weights, whole, in one file that any program with safetensors reads."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from megamoe.checkpoint.format.reader import MOMENTS, STEP, WEIGHT, Saved, moment_name
from megamoe.checkpoint.tools.stream import Part, new_folder, whole, write_line, write_tensors
from megamoe.checkpoint.tools.verify import refuse_damaged

WEIGHTS, OPTIMIZER, DESCRIPTION = "model.safetensors", "optimizer.safetensors", "model.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def consolidate(source: Path, path: Path, dtype: str | None = None, optimizer: bool = False) -> None:
    """Write a folder: model.safetensors, model.json, SHA256SUMS; with `optimizer`, optimizer.safetensors too.

    dtype: of the parameters, one of DTYPES; None: as they are saved. Buffers and moments keep their own.

    Raises:
        UserError: if the checkpoint is damaged, or `path` exists.
    """
    refuse_damaged(source)
    with Saved(source) as saved, new_folder(path, source) as folder:
        weights = {name.removeprefix(WEIGHT): _part(saved, name, dtype) for name in saved.names(WEIGHT)}
        write_tensors(folder / WEIGHTS, weights, saved)
        if optimizer:
            prefixes = (STEP, *(moment_name(moment, "") for moment in MOMENTS))
            names = [name for prefix in prefixes for name in saved.names(prefix)]
            write_tensors(folder / OPTIMIZER, {name: _part(saved, name, None) for name in names}, saved)
        write_line(folder / DESCRIPTION, _readable(_description(saved, weights)))


def count_parameters(saved: Saved) -> dict[str, int]:
    """total, and experts: those of routed ones among them. Buffers are none."""
    sizes = {
        name: math.prod(saved.shape(WEIGHT + name))
        for name in saved.index["shardings"]
        if WEIGHT + name in saved.index["tensors"]
    }
    experts = [size for name, size in sizes.items() if saved.index["shardings"][name].get("expert")]
    return {"total": sum(sizes.values()), "experts": sum(experts)}


def _part(saved: Saved, name: str, dtype: str | None) -> Part:
    own = dtype is None or name.removeprefix(WEIGHT) not in saved.index["shardings"]
    return Part(name, whole(saved.shape(name)), saved.dtype(name) if own else DTYPES[str(dtype)])


def _description(saved: Saved, weights: dict[str, Part]) -> dict[str, Any]:
    meta = saved.meta
    tensors = {
        name: {
            "shape": saved.shape(part.name),
            "dtype": str(part.dtype).removeprefix("torch."),
            "parameters": part.box.numel if name in saved.index["shardings"] else 0,
        }
        for name, part in sorted(weights.items())
    }
    return {
        "source": str(saved.path),
        **{key: meta[key] for key in ("step", "tokens", "saved_at", "vocabulary")},
        "parameters": count_parameters(saved),
        "tensors": tensors,
        "config": meta["config"],
    }


def _readable(description: dict[str, Any]) -> str:
    """JSON with a line for each tensor."""
    rows = (f"  {json.dumps(name)}: {json.dumps(it)}" for name, it in description["tensors"].items())
    text = json.dumps({**description, "tensors": {}}, indent=1)
    return text.replace('"tensors": {}', '"tensors": {\n' + ",\n".join(rows) + "\n }", 1)
