"""A rank's training state as chunks of global tensors, for saving and loading.

model/<name>         the weight that the optimiser steps on (fp32), a weight that is not trained, or a buffer
exp_avg/<name>, exp_avg_sq/<name>, step/<name>      Adam's moments, and its number of steps
momentum_buffer/<name>                              Muon's momentum
ema/<name>                                          the exponential mean of the weight
random/<rank>/...    the random states of each rank
"""

from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn

from megamoe.checkpoint.format.reader import MEAN, MOMENTS, STEP, WEIGHT, CheckpointReader, moment_name
from megamoe.compat.deepspeed_compat import counts_steps_in_int
from megamoe.errors import UserError
from megamoe.optim.muon import moments_of
from megamoe.parallel import random_state
from megamoe.parallel.chunks import LocalChunk, local_chunks_of, whole_tensor
from megamoe.parallel.consensus import gather_from_ranks
from megamoe.parallel.layout import Layout
from megamoe.parallel.placements import placements
from megamoe.parallel.zero.engine import Engine
from megamoe.parallel.zero.shards import Fragment, Shard, held_part

RANDOM = "random/"


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's persistent buffers, which are the same on every rank, by name.

    The extra state of modules is left out: Transformer Engine pickles its FP8 scales into it. They are found
    again within a few steps.
    """
    parameters = {name for name, _ in model.named_parameters()}
    state = model.state_dict(keep_vars=True).items()
    return {
        name: tensor
        for name, tensor in state
        if torch.is_tensor(tensor) and name not in parameters and not name.endswith("_extra_state")
    }


def weight_chunks(
    model: nn.Module, layout: Layout, rank: int, prefix: str = "", without: Container[str] = ()
) -> Iterator[LocalChunk]:
    """Yield all weights and buffers of a module that ZeRO has not sharded yet.

    prefix: of its names in the model. without: names in the model that are left out.
    """
    found = placements(model, layout, rank)
    for name, parameter in model.named_parameters():
        if prefix + name not in without:
            yield from local_chunks_of(f"{WEIGHT}{prefix}{name}", found[name], parameter.detach().view(-1))
    for name, buffer in buffers(model).items():
        if prefix + name not in without:
            yield whole_tensor(f"{WEIGHT}{prefix}{name}", buffer)


class SavedWeights:
    """The weights and buffers of a checkpoint, for a model that is loaded as a whole or part by part.

    advice: ends the message about a saved tensor that is left over. filled: the names of the model's tensors
    that were loaded, or that must stay as they are.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        layout: Layout,
        rank: int,
        advice: str = "use the configuration that saved it",
    ) -> None:
        self._reader, self._layout, self._rank, self._advice = reader, layout, rank, advice
        self.filled: set[str] = set()
        self._used: set[str] = set()  # names in the checkpoint

    def fill(self, prefix: str, module: nn.Module) -> None:
        """Load the tensors of a module that were not loaded before; ZeRO may not have cut these yet.

        prefix: of its names in the model: none, or one that ends with a dot.

        Raises:
            UserError: if a tensor is missing or has another shape.
        """
        chunks = list(weight_chunks(module, self._layout, self._rank, prefix, self.filled))
        self.fill_chunks(chunks, {local.name.removeprefix(WEIGHT) for local in chunks})

    def fill_chunks(self, chunks: list[LocalChunk], names: set[str]) -> None:
        """Load these chunks, with which the model's tensors of these names are loaded."""
        self._reader.fill(chunks)
        self._used |= {local.name for local in chunks}
        self.filled |= names

    def finish(self, unused: str | None = None) -> None:
        """Check that the whole checkpoint was used; its files stay open. Collective with pipeline stages.

        unused: the beginning of the names of tensors that need not be used.

        Raises:
            UserError: if a saved weight or buffer is left over.
        """
        used = self._used
        if self._layout.pipeline > 1:
            used = set().union(*gather_from_ranks(used))
        left = {name.removeprefix(WEIGHT) for name in set(self._reader.names(WEIGHT)) - used}
        if unused is not None:
            left = {name for name in left if not name.startswith(unused)}
        if left:
            raise UserError(f"{self._reader.path}: this model has no place for {min(left)}; {self._advice}")


def load_weights(reader: CheckpointReader, model: nn.Module, layout: Layout, rank: int) -> None:
    """Load a model's weights and buffers.

    Raises:
        UserError: if a tensor of the model is missing or has another shape, or the model lacks a saved one.
    """
    saved = SavedWeights(reader, layout, rank)
    saved.fill("", model)
    saved.finish()


class EngineState:
    """The chunks of an engine's weights, optimiser state and random states on this rank."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        model, self._rank = engine.model, engine.world.rank
        self._placements = placements(model, engine.layout, self._rank)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def chunk_groups(self) -> Iterator[list[LocalChunk]]:
        """Yield all chunks of this rank in groups.

        The memory of a group may be freed when the next is asked for.
        """
        yield list(self._untrained())
        for shard in self.engine.optimizer_shards():
            yield [local for fragment in _saved(shard) for local in self._trained(fragment)]

    def planned_chunks(self) -> list[LocalChunk]:
        """Return the chunks of a save after the next step, which makes the moments and the mean.

        Those of what the optimiser steps on are without values, on the meta device.
        """
        chunks = list(self._untrained())
        for shard in self.engine.optimizer_shards(values=False):
            for fragment in _saved(shard):
                name, tensor = self._name(fragment), fragment.tensor
                moments = moments_of(self.engine.inner_optimizer, tensor, MOMENTS)
                dtypes = {WEIGHT: tensor.dtype}
                if self.engine.weight_mean is not None:
                    dtypes[MEAN] = torch.float32
                dtypes |= {moment_name(moment, ""): self._moment_dtype(tensor) for moment in moments}
                for prefix, dtype in dtypes.items():
                    flat = torch.empty(fragment.numel, dtype=dtype, device="meta")
                    chunks += local_chunks_of(prefix + name, self._placements[name], flat, fragment.start)
                if moments == MOMENTS:
                    chunks.append(whole_tensor(STEP + name, torch.empty((), device="meta")))
        return chunks

    def load(self, reader: CheckpointReader) -> None:
        """Load the optimiser's weights and moments.

        Raises:
            UserError: if a tensor is missing or has another shape.
        """
        for shard in self.engine.optimizer_shards():
            if self.engine.precision != "fp32":  # else they are the model's weights, which are loaded already
                reader.fill(c for each in shard.fragments for c in self._chunks(WEIGHT, each, each.tensor))
            self._load_moments(reader, shard)
            self._load_mean(reader, shard)

    def _load_moments(self, reader: CheckpointReader, shard: Shard) -> None:
        """Load the moments of Adam or of Muon.

        A weight that was never stepped has none, or zeros in a flat tensor with others. So has one that
        another algorithm stepped.
        """
        state, known = self.engine.inner_optimizer.state, set(reader.names())
        for tensor in shard.tensors:
            names = moments_of(self.engine.inner_optimizer, tensor, MOMENTS)
            fragments = [fragment for fragment in shard.fragments if fragment.tensor is tensor]
            mark = STEP if names == MOMENTS else moment_name(names[0], "")
            stepped = [each for each in fragments if mark + self._name(each) in known]
            state.pop(tensor, None)
            if not stepped:
                continue
            dtype = self._moment_dtype(tensor)
            moments = {moment: torch.zeros_like(tensor.detach(), dtype=dtype) for moment in names}
            for moment, values in moments.items():
                reader.fill(
                    c for each in stepped for c in self._chunks(moment_name(moment, ""), each, values)
                )
            state[tensor] = dict(moments)
            if names != MOMENTS:
                continue  # Muon does not count
            count = torch.stack([reader.tensor(STEP + self._name(each)) for each in stepped]).max()
            in_int = counts_steps_in_int(self.engine.inner_optimizer)  # DeepSpeed's own optimizer for the CPU
            state[tensor]["step"] = int(count) if in_int else count.to(tensor.device, torch.float32)

    def _load_mean(self, reader: CheckpointReader, shard: Shard) -> None:
        """Load the mean of the weights; where none was saved, it begins after the next step."""
        mean, known = self.engine.weight_mean, set(reader.names(MEAN))
        for tensor in shard.tensors if mean is not None else ():
            fragments = [each for each in shard.fragments if each.tensor is tensor]
            saved = [each for each in fragments if MEAN + self._name(each) in known]
            if saved and mean is not None:
                values = tensor.detach().to(torch.float32, copy=True)  # as `WeightMean` keeps it
                reader.fill(c for each in saved for c in self._chunks(MEAN, each, values))
                mean.of[tensor] = values

    def _untrained(self) -> Iterator[LocalChunk]:
        """Yield the frozen weights, on the first rank of each pipeline stage the buffers, and the random
        states.
        """
        model = self.engine.model
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad and not _is_copy(parameter):
                flat, start = held_part(parameter)
                yield from local_chunks_of(f"{WEIGHT}{name}", self._placements[name], flat, start)
        if self._rank % self.engine.layout.stage_ranks == 0:
            for name, buffer in buffers(model).items():
                yield whole_tensor(f"{WEIGHT}{name}", buffer)
        for name, tensor in random_state.capture(self.engine.world.device).items():
            yield whole_tensor(f"{random_prefix(self._rank)}{name}", tensor)

    def _trained(self, fragment: Fragment) -> Iterator[LocalChunk]:
        """Yield a fragment's weight, its mean, and its optimiser state if it has been stepped."""
        yield from self._chunks(WEIGHT, fragment, fragment.tensor)
        mean = self.engine.weight_mean
        if mean is not None and fragment.tensor in mean.of:
            yield from self._chunks(MEAN, fragment, mean.of[fragment.tensor])
        state = self.engine.inner_optimizer.state.get(fragment.tensor)
        if not state:
            return
        names = moments_of(self.engine.inner_optimizer, fragment.tensor, MOMENTS)
        for moment in names:
            yield from self._chunks(moment_name(moment, ""), fragment, state[moment])
        if names == MOMENTS:
            yield whole_tensor(
                STEP + self._name(fragment), torch.as_tensor(state["step"], dtype=torch.float32)
            )

    def _chunks(self, prefix: str, fragment: Fragment, values: Tensor) -> Iterator[LocalChunk]:
        name = self._name(fragment)
        return local_chunks_of(prefix + name, self._placements[name], fragment.of(values), fragment.start)

    def _name(self, fragment: Fragment) -> str:
        return self._names[id(fragment.parameter)]

    def _moment_dtype(self, tensor: Tensor) -> torch.dtype:
        return getattr(self.engine.inner_optimizer, "moment_dtype", tensor.dtype)


def _saved(shard: Shard) -> Iterator[Fragment]:
    """Yield the fragments that this rank offers to a save."""
    return (fragment for fragment in shard.fragments if not _is_copy(fragment.parameter))


def _is_copy(parameter: nn.Parameter) -> bool:
    """Return whether an earlier pipeline stage saves the weight (a tied embedding).

    ZeRO cuts each stage at other elements, so the chunks of both would overlap.
    """
    return getattr(parameter, "counted_elsewhere", False)


def random_prefix(rank: int) -> str:
    """Return the prefix of the names of a rank's random states."""
    return f"{RANDOM}{rank:05d}/"


def load_random(reader: CheckpointReader, rank: int, device: torch.device) -> None:
    """Restore the random states that rank `rank` of the saving run had.

    Raises:
        UserError: if they are missing or damaged.
    """
    prefix = random_prefix(rank)
    states = {name.removeprefix(prefix): reader.tensor(name) for name in reader.names(prefix)}
    try:
        random_state.restore(states, device)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{reader.path}: the random states of rank {rank} are damaged ({error})") from None
