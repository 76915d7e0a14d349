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
from pathlib import Path

import torch
from torch import nn

from megamoe.checkpoint.format import files
from megamoe.checkpoint.format.files import damaged
from megamoe.checkpoint.format.meta import read_meta
from megamoe.checkpoint.format.reader import WEIGHT, CheckpointReader
from megamoe.checkpoint.state import SavedWeights
from megamoe.compat.deepspeed_zero import whole_shape
from megamoe.config.schema import InitConfig
from megamoe.errors import UserError
from megamoe.moe import rng
from megamoe.moe.experts.activations import num_halves
from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.moe.layer import MoELayer
from megamoe.parallel.chunks import Chunk, LocalChunk
from megamoe.parallel.layout import Layout
from megamoe.parallel.placements import shardings

KEY = "checkpoint.init.path"
HEAD = "head."  # of the names of a head's tensors
OTHER_EXPERTS = "start from one of the same model, but for what checkpoint.init.experts says"


class InitialWeights:
    """The weights of another run's checkpoint, for a model that is loaded as a whole or part by part.

    init: the section `checkpoint.init`. is_moe: whether the model has MoE layers. seed: of the noise. kept:
    the names, inside the MoE layer, of the tensors that a dense checkpoint lacks and that keep their initial
    values (router, shared experts, state of the losses); for `same` there are none. new_head: whether the
    model's head stays as drawn and the checkpoint's is left out, because they predict different things.

    Raises (when built, in `fill` and in `finish`):
        UserError: if a file is missing or damaged, a tensor is missing, has another shape or is not in this
            model, or the checkpoint is of a dense model where `experts` expects an MoE model, or the reverse.
    """

    def __init__(
        self, init: InitConfig, is_moe: bool, layout: Layout, rank: int, new_head: bool = False, seed: int = 0
    ) -> None:
        path = Path(str(init.path))
        read_meta(path, KEY)  # has the clearer message for a path that is no checkpoint
        problem = next(files.problems(path, rank, layout.ranks), None)
        if problem is not None:
            raise damaged(path, problem)
        self._init, self._layout, self._rank, self._seed = init, layout, rank, seed
        self._reader = CheckpointReader(path, KEY)
        _check_kind(self._reader, is_moe, init.experts)
        advice = {} if init.experts == "same" else {"advice": OTHER_EXPERTS}
        self._saved = SavedWeights(self._reader, layout, rank, **advice)
        self.kept: list[str] = []
        self.new_head = new_head

    def fill(self, prefix: str, module: nn.Module) -> None:
        """Load the tensors of a module that were not loaded before; ZeRO may not have cut these yet.

        prefix: of its names in the model: none, or one that ends with a dot.
        """
        if self.new_head:
            names = {prefix + name for name in module.state_dict()}
            self._saved.filled |= {name for name in names if name.startswith(HEAD)}
        if self._init.experts == "same":
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
            if not self._saved.filled.isdisjoint(names):
                continue
            ffn = f"{WEIGHT}{inside.removesuffix('layer.')}linear_fc"
            self._saved.fill_chunks(self._experts_from_ffn(ffn, layer), set(names))
            if self._init.noise:
                self._add_noise(ffn, layer)
            for parameter in layer.router.parameters():
                parameter.data.mul_(self._init.router_scale)
            found = [name.removeprefix(inside) for name in names if name not in routed]
            self.kept += [name for name in found if name not in self.kept]

    def _experts_from_ffn(self, ffn: str, layer: MoELayer) -> list[LocalChunk]:
        """Return this rank's expert weights of one layer as chunks of the FFN weights of the dense block.

        ffn: the name of the FFN's two linear layers in the checkpoint, without their number.
        """
        path, known, layout = self._reader.path, self._reader.names(WEIGHT), self._layout
        name = ffn.removeprefix(WEIGHT)
        if f"{ffn}1.bias" in known or f"{ffn}2.bias" in known:
            raise UserError(
                f"{path}: {name}1 and linear_fc2 have biases, which experts do not take; start from a dense "
                "model trained with model.bias=false"
            )
        assert isinstance(layer.experts, GroupedExperts)  # of one sub-layer: `validate` has refused others
        up, down = layer.experts.up.data, layer.experts.down.data
        up_name, down_name = f"{ffn}1.weight", f"{ffn}2.weight"
        if down_name not in known:
            raise UserError(f"{path}: {name}2.weight is missing; the checkpoint is of another model")
        hidden, here = down.shape[1:]
        size, cut = here * layout.expert_tensor, self._init.experts == "cut"
        whole = self._reader.shape(down_name)[-1]
        _check_ffn_size(path, whole, layer.num_experts, size, cut)
        halves = num_halves(layer.experts.activation)
        first_expert = self._first_expert(layer.experts)
        local_chunks = []
        for local in range(len(up)):
            start = self._rank % layout.expert_tensor * here + ((first_expert + local) * size if cut else 0)
            for half in range(halves):
                chunk = Chunk((half * whole + start, 0), (here, hidden))
                rows = up[local, half * here : (half + 1) * here]
                local_chunks.append(LocalChunk(up_name, (halves * whole, hidden), chunk, rows))
            columns = Chunk((0, start), (hidden, here))
            local_chunks.append(LocalChunk(down_name, (hidden, whole), columns, down[local]))
        return local_chunks

    def _add_noise(self, ffn: str, layer: MoELayer) -> None:
        """Add this rank's part of the noise to its experts, made of the FFN of these linear layers."""
        experts, layout = layer.experts, self._layout
        assert isinstance(experts, GroupedExperts)
        up_std, down_std = (
            float(self._reader.tensor(f"{ffn}{number}.weight").double().std()) * self._init.noise
            for number in (1, 2)
        )
        hidden, here = experts.down.shape[1:]
        halves, size = num_halves(experts.activation), here * layout.expert_tensor
        own_F = torch.arange(here) + self._rank % layout.expert_tensor * here
        own_G = torch.cat([own_F + half * size for half in range(halves)])  # rows of the first weight
        draws = functools.partial(rng.key, self._seed, 0, layer.router.dims.layer)
        for local in range(len(experts.up)):
            whose = f"noise of expert {self._first_expert(experts) + local}"
            experts.up.data[local] += up_std * rng.normal(draws(whose), own_G, hidden)
            experts.down.data[local] += down_std * rng.normal(draws(f"{whose}, down"), own_F, hidden).T

    def _first_expert(self, experts: GroupedExperts) -> int:
        """Return the number of this rank's first expert."""
        return self._layout.expert_rank(self._rank) * len(experts.up)


def _check_kind(reader: CheckpointReader, is_moe: bool, experts: str) -> None:
    """Raise UserError if the checkpoint is dense or MoE against this model and `experts`."""
    was_moe = any(it.get("expert") for it in reader.index["shardings"].values())
    if experts == "same" and is_moe and not was_moe:
        problem = "of a dense model; say checkpoint.init.experts=cut or copy"
    elif experts == "same" and was_moe and not is_moe:
        problem = "of an MoE model, this one is dense (moe.layers)"
    elif experts != "same" and was_moe:
        problem = f"of an MoE model, which has no dense FFN to {experts}; say checkpoint.init.experts=same"
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
