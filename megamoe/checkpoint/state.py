"""A rank's training state as chunks of global tensors, for saving and loading.

model/<name>         the weight that the optimiser steps on (fp32), a weight that is not trained, or a buffer
exp_avg/<name>, exp_avg_sq/<name>, step/<name>      Adam's moments, and its number of steps
random/<rank>/...    the random states of each rank
"""

from collections.abc import Container, Iterable, Iterator

import torch
from torch import Tensor, nn

from megamoe.checkpoint.format.chunks import Chunk, LocalChunk, local_chunks_of
from megamoe.checkpoint.format.reader import MOMENTS, STEP, WEIGHT, CheckpointReader, moment_name
from megamoe.checkpoint.placements import placements
from megamoe.compat.deepspeed_compat import counts_steps_in_int
from megamoe.errors import UserError
from megamoe.parallel import random_state
from megamoe.parallel.layout import Layout
from megamoe.zero.engine import Engine
from megamoe.zero.shards import Fragment, Shard, held_part

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
            yield _whole(f"{WEIGHT}{prefix}{name}", buffer)


class SavedWeights:
    """The weights and buffers of a checkpoint, for a model that is loaded as a whole or part by part.

    advice: ends the message about a saved tensor that is left over.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        layout: Layout,
        rank: int,
        advice: str = "use the configuration that saved it",
    ) -> None:
        self._reader, self._layout, self._rank, self._advice = reader, layout, rank, advice
        self._filled: set[str] = set()  # names of the model's tensors
        self._used: set[str] = set()  # names in the checkpoint

    def fill(self, prefix: str, module: nn.Module) -> None:
        """Load the tensors of a module that were not loaded before; ZeRO may not have cut these yet.

        prefix: of its names in the model: none, or one that ends with a dot.

        Raises:
            UserError: if a tensor is missing or has another shape.
        """
        chunks = list(weight_chunks(module, self._layout, self._rank, prefix, self._filled))
        self.fill_chunks(chunks, {local.name.removeprefix(WEIGHT) for local in chunks})

    def fill_chunks(self, chunks: list[LocalChunk], names: set[str]) -> None:
        """Load these chunks, with which the model's tensors of these names are loaded."""
        self._reader.fill(chunks)
        self._used |= {local.name for local in chunks}
        self._filled |= names

    def is_filled(self, name: str) -> bool:
        """Return whether the model's tensor of this name was loaded."""
        return name in self._filled

    def leave(self, names: set[str]) -> None:
        """Do not load the model's tensors of these names: they stay as they are."""
        self._filled |= names

    def finish(self, unused: str | None = None) -> None:
        """Check that the whole checkpoint was used; its files stay open.

        unused: the beginning of the names of tensors that need not be used.

        Raises:
            UserError: if a saved weight or buffer is left over.
        """
        left = {name.removeprefix(WEIGHT) for name in set(self._reader.names(WEIGHT)) - self._used}
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
        yield list(self._untrained()) + list(self._random_states())
        for shard in self.engine.optimizer_shards():
            yield [local for fragment in shard.fragments for local in self._trained(fragment)]

    def load(self, reader: CheckpointReader) -> None:
        """Load the optimiser's weights and moments.

        Raises:
            UserError: if a tensor is missing or has another shape.
        """
        masters = (
            self.engine.precision != "fp32"
        )  # else they are the model's weights, which are loaded already
        for shard in self.engine.optimizer_shards():
            if masters:
                reader.fill(p for fragment in shard.fragments for p in self._weight(fragment))
            self._load_moments(reader, shard)

    def _load_moments(self, reader: CheckpointReader, shard: Shard) -> None:
        """Load Adam's moments.

        A weight that was never stepped has none, or zeros in a flat tensor with others.
        """
        state, known = self.engine.inner_optimizer.state, set(reader.names(STEP))
        for tensor in shard.tensors:
            fragments = [fragment for fragment in shard.fragments if fragment.tensor is tensor]
            stepped = [fragment for fragment in fragments if STEP + self._name(fragment) in known]
            state.pop(tensor, None)
            if not stepped:
                continue
            moments = {moment: torch.zeros_like(tensor.detach()) for moment in MOMENTS}
            steps = [reader.tensor(STEP + self._name(fragment)) for fragment in stepped]
            reader.fill(
                p for f in stepped for m, values in moments.items() for p in self._moment(f, m, values)
            )
            state[tensor] = {"step": self._step(torch.stack(steps).max(), tensor), **moments}

    def _step(self, count: Tensor, tensor: Tensor) -> Tensor | int:
        """As the optimiser counts: DeepSpeed's own for the CPU does so in an int."""
        if counts_steps_in_int(self.engine.inner_optimizer):
            return int(count)
        return count.to(tensor.device, torch.float32)

    def _untrained(self) -> Iterator[LocalChunk]:
        """Yield the frozen weights, and on the first rank the buffers."""
        model = self.engine.model
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                flat, start = held_part(parameter)
                yield from local_chunks_of(f"{WEIGHT}{name}", self._placements[name], flat, start)
        if self._rank == 0:
            for name, buffer in buffers(model).items():
                yield _whole(f"{WEIGHT}{name}", buffer)

    def _random_states(self) -> Iterator[LocalChunk]:
        for name, tensor in random_state.capture(self.engine.world.device).items():
            yield _whole(f"{random_prefix(self._rank)}{name}", tensor)

    def _trained(self, fragment: Fragment) -> Iterator[LocalChunk]:
        """Yield a fragment's weight, and its optimiser state if it has been stepped."""
        yield from self._weight(fragment)
        state = self.engine.inner_optimizer.state.get(fragment.tensor)
        if not state:
            return
        for moment in MOMENTS:
            yield from self._moment(fragment, moment, state[moment])
        yield _whole(STEP + self._name(fragment), torch.as_tensor(state["step"], dtype=torch.float32))

    def _weight(self, fragment: Fragment) -> Iterable[LocalChunk]:
        return self._chunks(WEIGHT + self._name(fragment), fragment, fragment.tensor)

    def _moment(self, fragment: Fragment, moment: str, values: Tensor) -> Iterable[LocalChunk]:
        return self._chunks(moment_name(moment, self._name(fragment)), fragment, values)

    def _chunks(self, name: str, fragment: Fragment, values: Tensor) -> Iterable[LocalChunk]:
        return local_chunks_of(
            name, self._placements[self._name(fragment)], fragment.of(values), fragment.start
        )

    def _name(self, fragment: Fragment) -> str:
        return self._names[id(fragment.parameter)]


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


def _whole(name: str, tensor: Tensor) -> LocalChunk:
    """Return a tensor as the one chunk that fills it."""
    shape = tuple(tensor.shape)
    return LocalChunk(name, shape, Chunk((0,) * len(shape), shape), tensor.detach())
