"""The map between the tensors of a folder and ours: lines of a table, and what follows from a line.

A line names a tensor of ours, its shape in letters, the tensors of the folder that hold its elements, and how
these lie in it: a function that returns views of our tensor. Reading a folder fills the views, writing one
copies them out; so both directions are the same line.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megamoe.apps.hf.tensor_files import Shape
from megamoe.parallel.chunks import Sharding

Dims = Mapping[str, int]  # sizes by letter: V vocabulary, H hidden, F dense FFN, E experts, X expert FFN, ...
View = tuple[Tensor, Shape]  # a view of our tensor, and the shape in which the folder holds its elements
Split = Callable[[Tensor, Dims], list[View]]
Blocks = Literal["once", "all", "dense", "moe"]

WHOLE = Sharding()
COLUMNS, ROWS, GATED = Sharding(tensor=(0, 1)), Sharding(tensor=(1, 1)), Sharding(tensor=(0, 2))
EXPERT_UP, EXPERT_DOWN = Sharding(expert=True, slices=(1, 2)), Sharding(expert=True, slices=(2, 1))
EXPERT_BIAS = Sharding(expert=True, slices=(1, 1))  # of the second linear layer
BLOCK = "model.decoder.layers.{b}."
TERM = re.compile(r"(\d*)([A-Za-z]*)\Z")


def whole(ours: Tensor, dims: Dims) -> list[View]:
    """One tensor of the same shape."""
    return [(ours, tuple(ours.shape))]


def halves(ours: Tensor, dims: Dims) -> list[View]:
    """[2F, ...] -> the gate and the value, [F, ...] each."""
    return [(half, tuple(half.shape)) for half in ours.chunk(2)]


def query_key_value(ours: Tensor, dims: Dims) -> list[View]:
    """Queries, keys and values, of which Megatron-Core has the rows of each group together.

    D: the head size; N: heads; G: groups.
    """
    size, groups = dims["D"], dims["G"]
    rows = dims["N"] // groups * size
    grouped = ours.view(groups, rows + 2 * size, *ours.shape[1:])
    parts = grouped.split([rows, size, size], dim=1)
    return [(part, (groups * part.shape[1], *ours.shape[1:])) for part in parts]


def row(ours: Tensor, dims: Dims) -> list[View]:
    """[H] -> [1, H]."""
    return [(ours[None], (1, *ours.shape))]


def transposed(ours: Tensor, dims: Dims) -> list[View]:
    """[E, rows, columns] -> [E, columns, rows]."""
    return [(ours.transpose(1, 2), (ours.shape[0], ours.shape[2], ours.shape[1]))]


def interleaved(ours: Tensor, dims: Dims) -> list[View]:
    """[E, 2F] -> [E, 2F], in which gate and value alternate."""
    return [(ours.unflatten(1, (2, -1)).transpose(1, 2), tuple(ours.shape))]


def transposed_interleaved(ours: Tensor, dims: Dims) -> list[View]:
    """[E, 2F, H] -> [E, H, 2F], in whose columns gate and value alternate."""
    experts, rows, hidden = ours.shape
    return [(ours.unflatten(1, (2, -1)).permute(0, 3, 2, 1), (experts, hidden, rows))]


def of_each_expert(split: Split) -> Split:
    """[E, ...] -> the tensors of `split` for each expert."""

    def views(ours: Tensor, dims: Dims) -> list[View]:
        return [view for expert in ours for view in split(expert, dims)]

    return views


@dataclass(frozen=True)
class TensorMapping:
    """A tensor of ours and where the folder of a class has it: a line of the table of the class.

    ours: the name of our tensor; {b} is the block, from 0. shape: its dimensions in letters, such as "2F H"
    or "Q+2K H". sources: the names in the folder; {e} is the expert. cut: how layouts shard it. blocks: which
    blocks have it, or `once`. needs: the fact that the configuration must have, see `facts_of`; None: always.
    is_buffer: it is no parameter.
    """

    ours: str
    shape: str
    sources: str | tuple[str, ...]
    split: Split = whole
    cut: Sharding = WHOLE
    blocks: Blocks = "all"
    needs: str | None = None
    is_buffer: bool = False


@dataclass(frozen=True)
class BlockMapping:
    """A line for one block: `target`, of `shape`, holds the elements of `sources`, as `split` has them."""

    target: str
    shape: Shape
    sources: tuple[str, ...]
    split: Split
    cut: Sharding
    is_buffer: bool
    dims: Dims

    def views(self, ours: Tensor) -> dict[str, View]:
        """Return by source the view of our tensor that has its elements, and the source's shape."""
        return dict(zip(self.sources, self.split(ours, self.dims), strict=True))

    def source_shapes(self) -> dict[str, Shape]:
        """Return the shape of each source."""
        empty = torch.empty(self.shape, device="meta")
        return {name: shape for name, (_, shape) in self.views(empty).items()}


def shape_of(letters: str, dims: Dims) -> Shape:
    """Return the shape that letters stand for: "Q+2K H" with the sizes of Q, K and H."""
    return tuple(sum(_term(term, dims) for term in word.split("+")) for word in letters.split())


def _term(term: str, dims: Dims) -> int:
    match = TERM.match(term)
    assert match is not None and term, term
    return int(match[1] or 1) * (dims[match[2]] if match[2] else 1)


def flat(groups: Iterable[Iterable[BlockMapping]]) -> list[BlockMapping]:
    """Return the rules of all groups."""
    return [rule for group in groups for rule in group]


def expand(
    table: tuple[TensorMapping, ...],
    dims: Dims,
    facts: frozenset[str],
    moe_blocks: frozenset[int],
    num_blocks: int,
) -> list[list[BlockMapping]]:
    """Return the rules in groups: those that stand once, then those of each block.

    moe_blocks: the blocks with an MoE layer, from 0.
    """
    table = tuple(line for line in table if line.needs is None or line.needs in facts)
    groups = [[_rule(line, dims, None) for line in table if line.blocks == "once"]]
    for block in range(num_blocks):
        kinds = {"all", "moe" if block in moe_blocks else "dense"}
        groups.append([_rule(line, dims, block) for line in table if line.blocks in kinds])
    return groups


def _rule(line: TensorMapping, dims: Dims, block: int | None) -> BlockMapping:
    patterns = (line.sources,) if isinstance(line.sources, str) else line.sources
    experts = range(dims["E"]) if any("{e}" in pattern for pattern in patterns) else range(1)
    sources = tuple(pattern.format(b=block, e=expert) for expert in experts for pattern in patterns)
    shape = shape_of(line.shape, dims)
    return BlockMapping(line.ours.format(b=block), shape, sources, line.split, line.cut, line.is_buffer, dims)
