"""Loading the weights of another run's checkpoint into a new model, before an engine wraps it.

    same   the same model, dense or MoE
    cut    a dense model whose FFN is split into the experts (Yang et al. 2024, XMoE, section 3.6): expert e
           of E gets rows e F/E .. of the first weight (of gate and value each, if it has both) and those
           columns of the second, so that the experts together, each with weight 1, are the dense FFN
    copy   a dense model whose FFN is copied into every expert (Komatsuzaki et al. 2023, sparse upcycling),
           so that experts whose weights sum to 1 are the dense FFN

Experts that are cut or copied may get Gaussian noise, so that they can differ from the first step on: `noise`
times the standard deviation of the FFN's weight. A draw depends on (seed, layer, expert, row, column) alone.
`router_scale` multiplies the router's initial parameters; at 0 all experts have the same score.

The layout and the precision of the saving run do not matter. Each rank reads the chunks that it holds, and
verifies the checksums of its share of the files. The weights are the fp32 masters where the saving run had
them. The moments of its optimiser are not loaded.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from megamoe.checkpoint.format import integrity
from megamoe.checkpoint.format.chunks import Chunk, LocalChunk
from megamoe.checkpoint.format.files import damaged
from megamoe.checkpoint.format.meta import read_meta
from megamoe.checkpoint.format.reader import WEIGHT, CheckpointReader
from megamoe.checkpoint.placements import shardings
from megamoe.checkpoint.state import SavedWeights
from megamoe.compat.deepspeed_zero import whole_shape
from megamoe.errors import UserError
from megamoe.moe import rng
from megamoe.moe.experts.activations import num_halves
from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.moe.layer import MoELayer
from megamoe.parallel.layout import Layout

KEY = "checkpoint.init.path"
HEAD = "head."  # of the names of a head's tensors
Experts = Literal["same", "cut", "copy"]
ADVICE = {
    "same": "use the configuration that saved it",
    **dict.fromkeys(
        ("cut", "copy"), "start from one of the same model, but for what checkpoint.init.experts says"
    ),
}


@dataclass(frozen=True)
class Upcycling:
    """How experts made of a dense FFN start; see the module. seed: of the noise."""

    noise: float = 0.0
    router_scale: float = 1.0
    seed: int = 0


class InitialWeights:
    """The weights of another run's checkpoint, for a model that is loaded as a whole or part by part.

    is_moe: whether the model has MoE layers. kept: the names, inside the MoE layer, of the tensors that a
    dense checkpoint lacks and that keep their initial values (router, shared experts, state of the losses).
    For `same` there are none. new_head: whether the model's head stays as drawn and the checkpoint's is left
    out, because they predict different things.

    Raises (when built, in `fill` and in `finish`):
        UserError: if a file is missing or damaged, a tensor is missing, has another shape or is not in this
            model, or the checkpoint is of a dense model where `experts` expects an MoE model, or the reverse.
    """

    def __init__(
        self,
        path: Path,
        experts: Experts,
        is_moe: bool,
        layout: Layout,
        rank: int,
        new_head: bool = False,
        upcycling: Upcycling = Upcycling(),
    ) -> None:
        read_meta(path, KEY)  # has the clearer message for a path that is no checkpoint
        problem = integrity.first_of(integrity.problems(path, rank, layout.ranks))
        if problem is not None:
            raise damaged(path, problem)
        self._experts, self._layout, self._rank = experts, layout, rank
        self._upcycling = upcycling
        self._reader = CheckpointReader(path, KEY)
        _check_kind(self._reader, is_moe, experts)
        self._saved = SavedWeights(self._reader, layout, rank, ADVICE[experts])
        self.kept: list[str] = []
        self.new_head = new_head

    def fill(self, prefix: str, module: nn.Module) -> None:
        """Load the tensors of a module that were not loaded before; ZeRO may not have cut these yet.

        prefix: of its names in the model: none, or one that ends with a dot.
        """
        if self.new_head:
            self._saved.leave(
                {name for each in module.state_dict() if (name := prefix + each).startswith(HEAD)}
            )
        if self._experts == "same":
            _check_experts(self._reader, prefix, module, self._layout)
        else:
            self._fill_from_dense(prefix, module)
        self._saved.fill(prefix, module)

    def finish(self) -> None:
        """Check that the whole checkpoint was used, and close it."""
        self._saved.finish(unused=HEAD if self.new_head else None)
        self._reader.close()

    def _fill_from_dense(self, prefix: str, module: nn.Module) -> None:
        """Load the FFNs of a dense checkpoint into the experts; leave the rest of the MoE layers as it is."""
        layers = {
            f"{prefix}{name}.": layer for name, layer in module.named_modules() if isinstance(layer, MoELayer)
        }
        routed = {prefix + name for name, it in shardings(module).items() if it.expert}
        for inside, layer in layers.items():
            state = layer.state_dict().items()
            names = [inside + name for name, tensor in state if hasattr(tensor, "shape")]
            if any(map(self._saved.is_filled, names)):
                continue
            block, cut = inside.removesuffix("layer."), self._experts == "cut"
            chunks = _experts_from_ffn(self._reader, block, layer, cut, self._layout, self._rank)
            self._saved.fill_chunks(chunks, set(names))
            _add_noise(self._reader, block, layer, self._upcycling, self._layout, self._rank)
            for parameter in layer.router.parameters():
                parameter.data.mul_(self._upcycling.router_scale)
            found = [name.removeprefix(inside) for name in names if name not in routed]
            self.kept += [name for name in found if name not in self.kept]


def _check_kind(reader: CheckpointReader, is_moe: bool, experts: Experts) -> None:
    """Raise UserError if the checkpoint is dense or MoE against this model and `experts`."""
    was_moe = any(it.get("expert") for it in reader.index["shardings"].values())
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
    raise UserError(f"{reader.path}: the checkpoint is {problem}")


def _check_experts(reader: CheckpointReader, prefix: str, module: nn.Module, layout: Layout) -> None:
    """Check the number of experts in a module that is whole, or cut after it was checked."""
    known, sharding_by_name = reader.names(WEIGHT), shardings(module)
    for name, parameter in module.named_parameters():
        if sharding_by_name[name].expert and f"{WEIGHT}{prefix}{name}" in known:
            found = reader.shape(f"{WEIGHT}{prefix}{name}")[0]
            wanted = whole_shape(parameter)[0] * layout.expert
            if found != wanted:
                raise UserError(
                    f"{reader.path}: {prefix}{name} holds {found} experts, this model has "
                    f"moe.num_experts={wanted}; set it to {found}"
                )


def _experts_from_ffn(
    reader: CheckpointReader, block: str, layer: MoELayer, cut: bool, layout: Layout, rank: int
) -> list[LocalChunk]:
    """Return this rank's expert weights of one layer as chunks of the FFN weights of the dense block."""
    if any(f"{WEIGHT}{block}{part}.bias" in reader.names(WEIGHT) for part in ("linear_fc1", "linear_fc2")):
        raise UserError(
            f"{reader.path}: {block}linear_fc1 and linear_fc2 have biases, which experts do not take; start "
            "from a dense model trained with model.bias=false"
        )
    assert isinstance(layer.experts, GroupedExperts)  # of one sub-layer: `check_run` has refused others
    up, down = layer.experts.up.data, layer.experts.down.data
    up_name, down_name = (f"{WEIGHT}{block}{part}.weight" for part in ("linear_fc1", "linear_fc2"))
    if down_name not in reader.names(WEIGHT):
        raise UserError(
            f"{reader.path}: {down_name.removeprefix(WEIGHT)} is missing; the checkpoint is of another model"
        )
    hidden, here = down.shape[1:]
    size = here * layout.expert_tensor
    whole = reader.shape(down_name)[-1]
    _check_ffn_size(reader.path, whole, layer.num_experts, size, cut)
    halves = num_halves(layer.experts.activation)
    first_expert, slice_start = layout.expert_rank(rank) * len(up), rank % layout.expert_tensor * here
    local_chunks = []
    for local in range(len(up)):
        start = ((first_expert + local) * size if cut else 0) + slice_start
        for half in range(halves):
            chunk = Chunk((half * whole + start, 0), (here, hidden))
            rows = up[local, half * here : (half + 1) * here]
            local_chunks.append(LocalChunk(up_name, (halves * whole, hidden), chunk, rows))
        local_chunks.append(
            LocalChunk(down_name, (hidden, whole), Chunk((0, start), (hidden, here)), down[local])
        )
    return local_chunks


def _add_noise(
    reader: CheckpointReader, block: str, layer: MoELayer, options: Upcycling, layout: Layout, rank: int
) -> None:
    """Add this rank's part of the noise to its experts, made of the FFN of `block`."""
    if options.noise == 0:
        return
    experts = layer.experts
    assert isinstance(experts, GroupedExperts)
    up_std, down_std = (
        float(reader.tensor(f"{WEIGHT}{block}{part}.weight").double().std()) * options.noise
        for part in ("linear_fc1", "linear_fc2")
    )
    hidden, here = experts.down.shape[1:]
    halves, size = num_halves(experts.activation), here * layout.expert_tensor
    own_F = torch.arange(here) + rank % layout.expert_tensor * here
    own_G = torch.cat([own_F + half * size for half in range(halves)])  # rows of the first weight
    first_expert = layout.expert_rank(rank) * len(experts.up)
    for local in range(len(experts.up)):
        whose = f"noise of expert {first_expert + local}"
        draws = functools.partial(rng.key, options.seed, 0, layer.router.dims.layer)
        experts.up.data[local] += up_std * rng.normal(draws(whose), own_G, hidden)
        experts.down.data[local] += down_std * rng.normal(draws(f"{whose}, down"), own_F, hidden).T


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
