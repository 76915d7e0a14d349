"""Writing a checkpoint's whole weights into one safetensors file, for other programs."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from megamoe.checkpoint.format.reader import MOMENTS, STEP, WEIGHT, CheckpointReader, moment_name
from megamoe.checkpoint.tools.stream import OutputTensor, new_folder, write_line, write_tensors
from megamoe.checkpoint.tools.verify import refuse_damaged

WEIGHTS, OPTIMIZER, DESCRIPTION = "model.safetensors", "optimizer.safetensors", "model.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def consolidate(source: Path, path: Path, dtype: str | None = None, optimizer: bool = False) -> None:
    """Write a folder with model.safetensors, model.json and SHA256SUMS; if `optimizer`, optimizer.safetensors
    too.

    dtype: the key in DTYPES of the parameters' dtype; None: the saved one. Buffers and moments keep the saved
    dtype.

    Raises:
        UserError: if the checkpoint is damaged, or `path` exists.
    """
    refuse_damaged(source)
    with CheckpointReader(source) as reader, new_folder(path, source) as folder:
        weights = {
            name.removeprefix(WEIGHT): _output_tensor(reader, name, dtype) for name in reader.names(WEIGHT)
        }
        write_tensors(folder / WEIGHTS, weights, reader)
        if optimizer:
            prefixes = (STEP, *(moment_name(moment, "") for moment in MOMENTS))
            names = [name for prefix in prefixes for name in reader.names(prefix)]
            write_tensors(
                folder / OPTIMIZER, {name: _output_tensor(reader, name, None) for name in names}, reader
            )
        write_line(folder / DESCRIPTION, _readable(_description(reader, weights)))


def count_parameters(reader: CheckpointReader) -> dict[str, int]:
    """Return the number of parameters, `total`, and of those in routed experts, `experts`.

    Buffers do not count.
    """
    sizes = {
        name: math.prod(reader.shape(WEIGHT + name))
        for name in reader.index["shardings"]
        if WEIGHT + name in reader.index["tensors"]
    }
    experts = [size for name, size in sizes.items() if reader.index["shardings"][name].get("expert")]
    return {"total": sum(sizes.values()), "experts": sum(experts)}


def _output_tensor(reader: CheckpointReader, name: str, dtype: str | None) -> OutputTensor:
    keeps_dtype = dtype is None or name.removeprefix(WEIGHT) not in reader.index["shardings"]
    return OutputTensor(
        name, tuple(reader.shape(name)), reader.dtype(name) if keeps_dtype else DTYPES[str(dtype)]
    )


def _description(reader: CheckpointReader, weights: dict[str, OutputTensor]) -> dict[str, Any]:
    meta = reader.meta
    tensors = {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "parameters": tensor.numel if name in reader.index["shardings"] else 0,
        }
        for name, tensor in sorted(weights.items())
    }
    return {
        "source": str(reader.path),
        **{key: meta[key] for key in ("step", "tokens", "saved_at", "vocabulary")},
        "parameters": count_parameters(reader),
        "tensors": tensors,
        "config": meta["config"],
    }


def _readable(description: dict[str, Any]) -> str:
    """Return JSON with one line for each tensor."""
    rows = (f"  {json.dumps(name)}: {json.dumps(it)}" for name, it in description["tensors"].items())
    text = json.dumps({**description, "tensors": {}}, indent=1)
    return text.replace('"tensors": {}', '"tensors": {\n' + ",\n".join(rows) + "\n }", 1)
