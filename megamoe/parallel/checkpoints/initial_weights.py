"""The weights of another run's checkpoint as the start of a new model, before an engine has it.

    same   the same model, dense or MoE
    cut    a dense model whose FFN is cut into the experts (Yang et al. 2024, XMoE, section 3.6): expert e of
           E gets rows e F/E .. of the first weight (of SwiGLU's gate and value each) and those columns of
           the second, so that the experts together, each with weight 1, are the dense FFN
    copy   a dense model whose FFN is copied into every expert (Komatsuzaki et al. 2023, sparse upcycling),
           so that experts whose weights sum to 1 are the dense FFN

The expert-parallel size and the ZeRO stage that saved the checkpoint do not matter: its experts are put
together and dealt anew. What tensor parallelism has cut is refused. Tensors are read one by one, and of the
experts a rank's own alone. What is taken are the model's weights: a bf16 run has saved them in bf16, and its
optimiser's fp32 copies are left behind with the optimiser.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megamoe.errors import UserError
from megamoe.moe.experts.grouped import GroupedExperts, up_width
from megamoe.moe.layer import MoELayer
from megamoe.parallel.checkpoints.files import DENSE, experts_file, model_tensors, read_meta

KEY = "checkpoint.init.path"


def load_initial_weights(
    model: nn.Module, path: Path, experts: Literal["same", "cut", "copy"], expert_rank: int
) -> list[str]:
    """Fill the model, which is on the CPU; `expert_rank`: this rank's place in its expert-parallel group.

    Returns the tensors of MoE layers that a dense checkpoint cannot hold and that keep their start (router,
    shared experts, state of the losses), by their names inside the layer; none for `same`.

    Raises:
        UserError: in one line, for a file that is missing or damaged, a tensor that is missing, of another
            shape, or that this model has no place for, and a checkpoint that is dense or MoE against what
            `experts` expects.
    """
    with ExitStack() as files:
        saved = _SavedModel(path, files)
        dense, routed = model_tensors(model)
        layers = {f"{name}.": layer for name, layer in model.named_modules() if isinstance(layer, MoELayer)}
        _check_kind(saved, bool(routed), experts)
        kept: list[str] = []
        if experts == "same":
            _fill_same_experts(saved, layers, routed, expert_rank)
        else:
            for prefix, layer in layers.items():
                _fill_from_dense_ffn(saved, prefix, layer, experts == "cut", expert_rank)
            kept = [name for name in dense if name.startswith(tuple(layers))]
        for name in sorted(dense.keys() - kept):
            saved.fill(name, dense[name])
        saved.check_all_taken()
        return list(dict.fromkeys(_inside(name, layers) for name in kept))


def _check_kind(saved: "_SavedModel", is_moe: bool, experts: str) -> None:
    """Dense or MoE: the checkpoint against this model and what was asked for."""
    if experts == "same" and is_moe and not saved.experts:
        problem = "of a dense model; say checkpoint.init.experts=cut or copy"
    elif experts == "same" and saved.experts and not is_moe:
        problem = "of an MoE model, this one is dense (moe.layers)"
    elif experts != "same" and saved.experts:
        problem = (
            f"of an MoE model, which has no dense FFN to {experts}; say checkpoint.init.experts=same, or "
            "name a dense model's checkpoint"
        )
    else:
        return
    raise UserError(f"{saved.path}: the checkpoint is {problem}")


class _SavedModel:
    """A checkpoint's tensors, opened and not read, and which of them were taken."""

    def __init__(self, path: Path, files: ExitStack) -> None:
        self.path = path
        layout = read_meta(path, KEY)["layout"]
        for key in ("parallel.tensor", "parallel.expert_tensor"):
            if layout.get(key, 1) > 1:
                raise UserError(
                    f"{path}: saved with {key} {layout[key]}, but weights can be taken from one saved with 1 "
                    "alone yet; start from such a one, or go on with this by checkpoint.resume at its layout"
                )
        self._dense = _open(path / DENSE, files)
        self.experts: list[Any] = []
        if any(path.glob("experts_*.safetensors")):
            ranks = range(layout["parallel.expert"])
            self.experts = [_open(path / experts_file(rank), files) for rank in ranks]
        self._left = set(self._dense.keys())
        for file in self.experts:
            self._left |= set(file.keys())

    def take(self, name: str, shape: list[int] | None = None) -> Any:
        """A tensor to be sliced; reading it takes a slice."""
        return self._slice(self._dense, name, shape)

    def fill(self, name: str, target: Tensor) -> None:
        """target := the tensor of that name."""
        source = self.take(name, list(target.shape))
        target.copy_(source[:] if target.dim() else self._dense.get_tensor(name))

    def experts_of(self, name: str, shape: list[int], first: int) -> Iterator[Tensor]:
        """The experts' slices of a stacked tensor from number `first` on; shape: of one expert."""
        for file in self.experts:
            held = self._slice(file, name, None)
            if held.get_shape()[1:] != shape:
                self._misshapen(name, held.get_shape(), ["experts", *shape])
            number = held.get_shape()[0]
            for local in range(max(first, 0), number):
                yield held[local]
            first -= number

    def count_experts(self, name: str) -> int:
        """How many experts a stacked tensor has in all files."""
        return sum(self._slice(file, name, None).get_shape()[0] for file in self.experts)

    def check_all_taken(self) -> None:
        """Refuse what the model would have left behind."""
        if self._left:
            raise UserError(
                f"{self.path}: this model has no place for {min(self._left)} of the checkpoint; start from "
                "one of the same model, but for what checkpoint.init.experts says"
            )

    def has_left(self, name: str) -> bool:
        """Whether it holds a tensor of that name, which was not taken."""
        return name in self._left

    def _slice(self, file: Any, name: str, shape: list[int] | None) -> Any:
        try:
            found = file.get_slice(name)
        except SafetensorError:
            raise UserError(f"{self.path}: {name} is missing; the checkpoint is of another model") from None
        self._left.discard(name)
        if shape is not None and found.get_shape() != shape:
            self._misshapen(name, found.get_shape(), shape)
        return found

    def _misshapen(self, name: str, found: list[int], expected: list[Any]) -> None:
        raise UserError(
            f"{self.path}: {name} has shape {found}, this model needs {expected}; start from a checkpoint of "
            "the same sizes"
        )


def _fill_same_experts(
    saved: _SavedModel, layers: dict[str, MoELayer], routed: dict[str, Tensor], expert_rank: int
) -> None:
    for name, target in routed.items():
        wanted = next(layer.num_experts for prefix, layer in layers.items() if name.startswith(prefix))
        found = saved.count_experts(name)
        if found != wanted:
            raise UserError(
                f"{saved.path}: {name} holds {found} experts, this model has moe.num_experts={wanted}; "
                f"set it to {found}"
            )
        sources = saved.experts_of(name, list(target.shape[1:]), expert_rank * len(target))
        for expert, source in zip(target, sources, strict=False):
            expert.copy_(source)


def _fill_from_dense_ffn(
    saved: _SavedModel, prefix: str, layer: MoELayer, cut: bool, expert_rank: int
) -> None:
    """Experts of one layer from the FFN that stands in its place in the dense model."""
    block = prefix.removesuffix("layer.")
    up_name, down_name = f"{block}linear_fc1.weight", f"{block}linear_fc2.weight"
    if any(saved.has_left(f"{block}{part}.bias") for part in ("linear_fc1", "linear_fc2")):
        raise UserError(
            f"{saved.path}: {block}linear_fc1 and linear_fc2 have biases, experts have none; start from a "
            "dense model trained with model.bias=false"
        )
    assert isinstance(layer.experts, GroupedExperts)  # of one sub-layer: checked before anything was built
    up, down = layer.experts.up.data, layer.experts.down.data
    hidden, size = down.shape[1:]
    whole = saved.take(down_name).get_shape()[-1]
    _check_ffn_size(saved.path, whole, layer.num_experts, size, cut)
    halves = up_width(1, layer.experts.activation)
    source_down = saved.take(down_name, [hidden, whole])
    source_up = saved.take(up_name, [halves * whole, hidden])
    for local in range(len(up)):
        start = (expert_rank * len(up) + local) * size if cut else 0
        rows = [source_up[half * whole + start : half * whole + start + size] for half in range(halves)]
        up[local].copy_(torch.cat(rows))
        down[local].copy_(source_down[:, start : start + size])


def _check_ffn_size(path: Path, whole: int, num_experts: int, size: int, cut: bool) -> None:
    key = "moe.expert_ffn_hidden_size"
    if not cut and size != whole:
        raise UserError(
            f"{path}: copy needs experts of the dense FFN's size {whole}, found {size}; set {key}={whole}"
        )
    if cut and size * num_experts != whole:
        way_out = (
            f"set {key}={whole // num_experts}"
            if whole % num_experts == 0
            else f"choose a moe.num_experts that divides {whole}"
        )
        raise UserError(
            f"{path}: cut needs moe.num_experts x {key} of the dense FFN's size {whole}, found "
            f"{num_experts} x {size}; {way_out}"
        )


def _open(path: Path, files: ExitStack) -> Any:
    try:
        return files.enter_context(safe_open(str(path), framework="pt"))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: missing or damaged ({error}); start from another checkpoint") from None


def _inside(name: str, layers: dict[str, MoELayer]) -> str:
    return next(name.removeprefix(prefix) for prefix in layers if name.startswith(prefix))
