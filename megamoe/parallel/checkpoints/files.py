"""The files of a checkpoint: their names, what the JSON says, tensors written and read."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from deepspeed.moe.utils import is_moe_param
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from megamoe.errors import UserError
from megamoe.parallel.layout import Layout
from megamoe.parallel.zero.deepspeed_config import Precision

META = "checkpoint.json"
FORMAT = 1
DENSE = "dense.safetensors"


def experts_file(place: int) -> str:
    """Name of the file with the routed experts of that place among the ranks that hold all of them once."""
    return f"experts_{place:05d}.safetensors"


def dense_file(ranks: Layout, rank: int) -> str:
    """Name of the file with what a rank holds of the model but its routed experts."""
    return DENSE if ranks.tensor == 1 else f"dense_{ranks.tensor_rank(rank):05d}.safetensors"


def layout(ranks: Layout, stage: int, precision: Precision) -> dict[str, Any]:
    """What must be the same where a checkpoint is loaded."""
    return {
        "ranks": ranks.ranks,
        "parallel.tensor": ranks.tensor,
        "parallel.expert": ranks.expert,
        "parallel.expert_tensor": ranks.expert_tensor,
        "ZeRO stage": stage,
        "precision": precision,
    }


def check_layout(path: Path, meta: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse a checkpoint of another layout, naming the first key that differs."""
    for key, value in now.items():
        saved = meta["layout"].get(key, 1)  # an earlier checkpoint has no key for what was not cut then
        if saved != value:
            raise UserError(
                f"{path}: saved with {key} {saved}, this run has {value}; "
                "resume with the layout that saved it"
            )


def read_meta(path: Path, key: str = "checkpoint.resume") -> dict[str, Any]:
    """The checkpoint's JSON; `key` of the configuration named it.

    Raises:
        UserError: if `path` is no complete checkpoint, or one of another format.
    """
    try:
        meta: dict[str, Any] = json.loads((path / META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"{key}: {path} is not a complete checkpoint (no readable {META}); name a step_* folder"
            + (", or auto" if key == "checkpoint.resume" else "")
        ) from None
    if meta.get("format") != FORMAT:
        raise UserError(f"{path}: checkpoint format {meta.get('format')}, this version reads {FORMAT}")
    return meta


def dense_shapes(path: Path) -> dict[str, list[int]]:
    """Of what the first rank holds but routed experts, by name; none of them is read.

    Raises:
        UserError: if the file is missing or damaged.
    """
    cut = path / "dense_00000.safetensors"  # the first tensor rank's part
    file_path = cut if cut.exists() else path / DENSE
    try:
        with safe_open(str(file_path), framework="pt") as file:
            names = list(file.keys())
            return {name: list(file.get_slice(name).get_shape()) for name in names}
    except (OSError, SafetensorError) as error:
        raise damaged(file_path, error) from None


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and persistent buffers by name: the dense ones, and this rank's routed experts.

    A module's extra state is none of them: Transformer Engine pickles its FP8 scales into it, and they grow
    anew within a few steps.
    """
    dense, experts = split_state(model)
    return {name: t.detach() for name, t in dense.items()}, {name: t.detach() for name, t in experts.items()}


def split_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same, the parameters themselves."""
    state = model.state_dict(keep_vars=True).items()
    everything = {n: t for n, t in state if torch.is_tensor(t) and not n.endswith("_extra_state")}
    experts: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if is_moe_param(p)}
    return {name: tensor for name, tensor in everything.items() if name not in experts}, experts


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """As safetensors, on the disk when this returns."""
    save_file({name: _alone(tensor.detach()) for name, tensor in tensors.items()}, str(path))
    sync(path)


def _alone(tensor: Tensor) -> Tensor:
    """On the CPU; a copy where its storage holds more, which safetensors refuses."""
    mine = tensor.cpu().contiguous()
    return mine if mine.untyped_storage().nbytes() == mine.numel() * mine.itemsize else mine.clone()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Of a file of safetensors, on the CPU.

    Raises:
        UserError: if it is missing or damaged.
    """
    try:
        loaded: dict[str, Tensor] = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise damaged(path, error) from None
    return loaded


def damaged(path: Path, error: Exception) -> UserError:
    """What to raise of a file that cannot be read."""
    return UserError(f"{path}: missing or damaged ({error}); resume from another checkpoint")


def sync(path: Path) -> None:
    """A file, or a folder's names, onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Whole or not at all, and on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
