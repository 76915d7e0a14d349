"""The weights of another run's checkpoint as the start of a new model, before an engine has it.

    same   the same model, dense or MoE
    cut    a dense model whose FFN is cut into the experts (Yang et al. 2024, XMoE, section 3.6): expert e of
           E gets rows e F/E .. of the first weight (of gate and value each, if it has both) and those columns
           of the second, so that the experts together, each with weight 1, are the dense FFN
    copy   a dense model whose FFN is copied into every expert (Komatsuzaki et al. 2023, sparse upcycling),
           so that experts whose weights sum to 1 are the dense FFN

The layout and the precision that saved the checkpoint do not matter. Tensors are read box by box, on each
rank its own alone; of the files' checksums each rank works out its share. What is taken are the weights, in
fp32 where the run that saved them had such; its optimiser's moments are left behind.
"""

from pathlib import Path
from typing import Literal

from torch import nn

from megamoe.checkpoint.format import integrity
from megamoe.checkpoint.format.boxes import Box, Piece
from megamoe.checkpoint.format.files import damaged
from megamoe.checkpoint.format.meta import read_meta
from megamoe.checkpoint.format.reader import WEIGHT, Saved
from megamoe.checkpoint.placements import Sharding, shardings
from megamoe.checkpoint.state import fill_weights, load_weights, weight_pieces
from megamoe.errors import UserError
from megamoe.moe.experts.activations import num_halves
from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.moe.layer import MoELayer
from megamoe.parallel.layout import Layout

KEY = "checkpoint.init.path"


def load_initial_weights(
    model: nn.Module, path: Path, experts: Literal["same", "cut", "copy"], ranks: Layout, rank: int
) -> list[str]:
    """Fill the model, which is on the CPU, with what that rank holds. No rank may go on where another raises.

    Returns the tensors of MoE layers that a dense checkpoint cannot hold and that keep their start (router,
    shared experts, state of the losses), by their names inside the layer; none for `same`.

    Raises:
        UserError: in one line, for a file that is missing or damaged, a tensor that is missing, of another
            shape, or that this model has no place for, and a checkpoint that is dense or MoE against what
            `experts` expects.
    """
    read_meta(path, KEY)  # says what is no checkpoint at all
    problem = integrity.first(integrity.problems(path, rank, ranks.ranks))
    if problem is not None:
        raise damaged(path, problem)
    with Saved(path, KEY) as saved:
        cuts = shardings(model)
        _check_kind(saved, any(cut.expert for cut in cuts.values()), experts)
        if experts == "same":
            _check_experts(saved, model, cuts, ranks)
            load_weights(saved, model, ranks, rank)
            return []
        layers = {f"{name}.": layer for name, layer in model.named_modules() if isinstance(layer, MoELayer)}
        return _load_dense(saved, model, layers, experts == "cut", ranks, rank)


def _check_kind(saved: Saved, is_moe: bool, experts: str) -> None:
    """Dense or MoE: the checkpoint against this model and what was asked for."""
    was_moe = any(cut.get("expert") for cut in saved.index["shardings"].values())
    if experts == "same" and is_moe and not was_moe:
        problem = "of a dense model; say checkpoint.init.experts=cut or copy"
    elif experts == "same" and was_moe and not is_moe:
        problem = "of an MoE model, this one is dense (moe.layers)"
    elif experts != "same" and was_moe:
        problem = (
            f"of an MoE model, which has no dense FFN to {experts}; say checkpoint.init.experts=same, or "
            "name a dense model's checkpoint"
        )
    else:
        return
    raise UserError(f"{saved.path}: the checkpoint is {problem}")


def _check_experts(saved: Saved, model: nn.Module, cuts: dict[str, Sharding], ranks: Layout) -> None:
    known = saved.names(WEIGHT)
    for name, parameter in model.named_parameters():
        if cuts[name].expert and WEIGHT + name in known:
            found, wanted = saved.shape(WEIGHT + name)[0], len(parameter) * ranks.expert
            if found != wanted:
                raise UserError(
                    f"{saved.path}: {name} holds {found} experts, this model has moe.num_experts={wanted}; "
                    f"set it to {found}"
                )


def _load_dense(
    saved: Saved, model: nn.Module, layers: dict[str, MoELayer], cut: bool, ranks: Layout, rank: int
) -> list[str]:
    """Experts from the dense FFN in their place, the rest as it is; returns what keeps its start."""
    cuts, inside = shardings(model), tuple(layers)
    pieces = [
        p for p in weight_pieces(model, ranks, rank) if not p.name.removeprefix(WEIGHT).startswith(inside)
    ]
    for prefix, layer in layers.items():
        pieces += _experts_from_ffn(saved, prefix.removesuffix("layer."), layer, cut, ranks, rank)
    fill_weights(saved, pieces, "start from one of the same model, but for what checkpoint.init.experts says")
    state = [name for name, tensor in model.state_dict().items() if hasattr(tensor, "shape")]
    kept = [name for name in state if name.startswith(inside) and not (name in cuts and cuts[name].expert)]
    return list(dict.fromkeys(_inside(name, layers) for name in kept))


def _experts_from_ffn(
    saved: Saved, block: str, layer: MoELayer, cut: bool, ranks: Layout, rank: int
) -> list[Piece]:
    """What each expert of one layer, or this rank's slice of it, takes of the FFN of the dense block."""
    if any(f"{WEIGHT}{block}{part}.bias" in saved.names(WEIGHT) for part in ("linear_fc1", "linear_fc2")):
        raise UserError(
            f"{saved.path}: {block}linear_fc1 and linear_fc2 have biases, experts have none; start from a "
            "dense model trained with model.bias=false"
        )
    assert isinstance(layer.experts, GroupedExperts)  # of one sub-layer: checked before anything was built
    up, down = layer.experts.up.data, layer.experts.down.data
    up_name, down_name = (f"{WEIGHT}{block}{part}.weight" for part in ("linear_fc1", "linear_fc2"))
    if down_name not in saved.names(WEIGHT):
        raise UserError(
            f"{saved.path}: {down_name.removeprefix(WEIGHT)} is missing; the checkpoint is of another model"
        )
    hidden, here = down.shape[1:]
    size = here * ranks.expert_tensor
    whole = saved.shape(down_name)[-1]
    _check_ffn_size(saved.path, whole, layer.num_experts, size, cut)
    halves = num_halves(layer.experts.activation)
    first_expert, slice_start = ranks.expert_rank(rank) * len(up), rank % ranks.expert_tensor * here
    pieces = []
    for local in range(len(up)):
        start = ((first_expert + local) * size if cut else 0) + slice_start
        for half in range(halves):
            box = Box((half * whole + start, 0), (here, hidden))
            rows = up[local, half * here : (half + 1) * here]
            pieces.append(Piece(up_name, (halves * whole, hidden), box, rows))
        pieces.append(Piece(down_name, (hidden, whole), Box((0, start), (hidden, here)), down[local]))
    return pieces


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


def _inside(name: str, layers: dict[str, MoELayer]) -> str:
    return next(name.removeprefix(prefix) for prefix in layers if name.startswith(prefix))
