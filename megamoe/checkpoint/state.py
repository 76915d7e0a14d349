"""A rank's training state as pieces of logical tensors: what is saved, and what a checkpoint fills again.

model/<name>         the weight that the optimiser steps on (fp32), or what it does not train; buffers
exp_avg/<name>, exp_avg_sq/<name>, step/<name>      Adam's moments, and how often it has stepped
random/<rank>/...    each rank's random states
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from megamoe.checkpoint.format.boxes import Box, Piece, Placement, pieces_of
from megamoe.checkpoint.format.reader import MOMENTS, STEP, WEIGHT, Saved, moment_name
from megamoe.checkpoint.placements import placements
from megamoe.compat.deepspeed_compat import counts_steps_in_int
from megamoe.errors import UserError
from megamoe.parallel import random_state
from megamoe.parallel.layout import Layout
from megamoe.zero.engine import Engine
from megamoe.zero.shards import Fragment, Shard, held_part

RANDOM = "random/"


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """The persistent ones, which every rank has alike.

    A module's extra state is none of them: Transformer Engine pickles its FP8 scales into it, and they grow
    anew within a few steps.
    """
    parameters = {name for name, _ in model.named_parameters()}
    state = model.state_dict(keep_vars=True).items()
    return {
        name: tensor
        for name, tensor in state
        if torch.is_tensor(tensor) and name not in parameters and not name.endswith("_extra_state")
    }


def weight_pieces(model: nn.Module, ranks: Layout, rank: int) -> Iterator[Piece]:
    """All weights and buffers of a model that no ZeRO has cut yet."""
    where = placements(model, ranks, rank)
    for name, parameter in model.named_parameters():
        yield from pieces_of(f"{WEIGHT}{name}", where[name], parameter.detach().view(-1))
    for name, buffer in buffers(model).items():
        yield _whole(f"{WEIGHT}{name}", buffer)


def load_weights(saved: Saved, model: nn.Module, ranks: Layout, rank: int) -> None:
    """Fill a model's weights and buffers.

    Raises:
        UserError: if a tensor is missing, of another shape, or one that this model has no place for.
    """
    fill_weights(saved, list(weight_pieces(model, ranks, rank)), "use the configuration that saved it")


def fill_weights(saved: Saved, pieces: list[Piece], advice: str) -> None:
    """Fill pieces of weights and buffers, in which every saved one must have a place.

    Raises:
        UserError: if a tensor is missing or of another shape; with `advice`, if one has no place.
    """
    saved.fill(pieces)
    left = set(saved.names(WEIGHT)) - {piece.name for piece in pieces}
    if left:
        raise UserError(
            f"{saved.path}: this model has no place for {min(left).removeprefix(WEIGHT)}; {advice}"
        )


class EngineState:
    """The pieces of what an engine trains."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        model, self._rank = engine.model, engine.world.rank
        self._placements = placements(model, engine.layout, self._rank)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def pieces(self) -> Iterator[list[Piece]]:
        """All of this rank, in groups, of which some are in memory until the next is asked for only."""
        yield list(self._untrained()) + list(self._random())
        for shard in self.engine.optimizer_shards():
            yield [piece for fragment in shard.fragments for piece in self._of(fragment)]

    def load(self, saved: Saved) -> None:
        """Fill the optimiser's weights and moments.

        Raises:
            UserError: if a tensor is missing or of another shape.
        """
        masters = self.engine.precision != "fp32"  # else they are the model's weights, which are there
        for shard in self.engine.optimizer_shards():
            if masters:
                saved.fill(p for fragment in shard.fragments for p in self._weight(fragment))
            self._load_moments(saved, shard)

    def _load_moments(self, saved: Saved, shard: Shard) -> None:
        """A weight that was never stepped has none; beside others in a flat tensor it has zeros."""
        state, known = self.engine.inner_optimizer.state, set(saved.names(STEP))
        for tensor in shard.tensors:
            mine = [fragment for fragment in shard.fragments if fragment.tensor is tensor]
            stepped = [fragment for fragment in mine if STEP + self._name(fragment) in known]
            state.pop(tensor, None)
            if not stepped:
                continue
            moments = {moment: torch.zeros_like(tensor.detach()) for moment in MOMENTS}
            steps = [saved.tensor(STEP + self._name(fragment)) for fragment in stepped]
            saved.fill(
                p for f in stepped for m, values in moments.items() for p in self._moment(f, m, values)
            )
            state[tensor] = {"step": self._step(torch.stack(steps).max(), tensor), **moments}

    def _step(self, count: Tensor, tensor: Tensor) -> Tensor | int:
        """As the optimiser counts: DeepSpeed's own for the CPU does so in an int."""
        if counts_steps_in_int(self.engine.inner_optimizer):
            return int(count)
        return count.to(tensor.device, torch.float32)

    def _untrained(self) -> Iterator[Piece]:
        model = self.engine.model
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                flat, start = held_part(parameter)
                yield from pieces_of(f"{WEIGHT}{name}", self._placements[name], flat, start)
        if self._rank == 0:
            for name, buffer in buffers(model).items():
                yield _whole(f"{WEIGHT}{name}", buffer)

    def _random(self) -> Iterator[Piece]:
        for name, tensor in random_state.capture(self.engine.world.device).items():
            yield _whole(f"{random_prefix(self._rank)}{name}", tensor)

    def _of(self, fragment: Fragment) -> Iterator[Piece]:
        yield from self._weight(fragment)
        state = self.engine.inner_optimizer.state.get(fragment.tensor)
        if not state:
            return
        for moment in MOMENTS:
            yield from self._moment(fragment, moment, state[moment])
        yield _whole(STEP + self._name(fragment), torch.as_tensor(state["step"], dtype=torch.float32))

    def _weight(self, fragment: Fragment) -> Iterable[Piece]:
        return self._pieces(WEIGHT + self._name(fragment), fragment, fragment.tensor)

    def _moment(self, fragment: Fragment, moment: str, values: Tensor) -> Iterable[Piece]:
        return self._pieces(moment_name(moment, self._name(fragment)), fragment, values)

    def _pieces(self, name: str, fragment: Fragment, values: Tensor) -> Iterable[Piece]:
        return pieces_of(name, self._placements[self._name(fragment)], fragment.of(values), fragment.start)

    def _name(self, fragment: Fragment) -> str:
        return self._names[id(fragment.parameter)]


def random_prefix(rank: int) -> str:
    """Of a rank's random states."""
    return f"{RANDOM}{rank:05d}/"


def load_random(saved: Saved, rank: int, device: torch.device) -> None:
    """Go on from the random states of that rank of those that saved.

    Raises:
        UserError: if they are missing, or are none.
    """
    prefix = random_prefix(rank)
    states = {name.removeprefix(prefix): saved.tensor(name) for name in saved.names(prefix)}
    try:
        random_state.restore(states, device)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{saved.path}: the random states of rank {rank} are damaged ({error})") from None


def _whole(name: str, tensor: Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(name, Placement(shape).logical, Box((0,) * len(shape), shape), tensor.detach())
