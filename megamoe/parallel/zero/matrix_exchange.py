"""Muon's matrices between the ranks of a pipeline stage: each is gathered and orthogonalised by one of them.

A rank holds a rectangle of a matrix under tensor or expert tensor parallelism, and at ZeRO 1 to 3 a flat
slice of that rectangle. Every matrix has an owner among the ranks that hold parts of it. They send the owner
their parts of D (see `megamoe.optim.muon`). The owner computes the orthogonal matrix, and sends each rank its
part. A call takes two all-to-alls for all its matrices. Owners are chosen by FLOPs: the largest matrix first,
to the rank with the least work so far. At ZeRO 0 all replicas hold the same parts: the owner gathers from its
own replica, and sends to all.

Every rank works out the whole plan from the layout alone, so nothing is sent for it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.compat.deepspeed_zero import slices_at_zero1, slices_at_zero3, whole_shape
from megamoe.optim.matrices import Matrix, Row, flops, fused_weights, matrices_of, orthogonalise
from megamoe.optim.muon import Directions, Piece
from megamoe.parallel.chunks import Chunk, Placement, Sharding, chunks_of_range
from megamoe.parallel.consensus import CollectiveError
from megamoe.parallel.layout import Layout
from megamoe.parallel.placements import shardings

LEAST = 2  # rows and columns: a single row would only be divided by its norm
MOST_ELEMENTS = 1 << 26  # of the matrices that are orthogonalised together


@dataclass(frozen=True)
class SplitWeight:
    """A weight that Muon updates, and how the ranks hold it.

    matrices: of the whole weight, of each expert if `is_expert`. sharding: over the layout. local_shape: of a
    rank's part of it, before ZeRO. starts: replica r of this part holds its flattened elements from starts[r]
    to starts[r + 1]; None: all replicas hold all. tensor: what the optimizer steps on here; at: where this
    rank's elements begin in it.
    """

    name: str
    matrices: list[Matrix]
    is_expert: bool
    sharding: Sharding
    local_shape: tuple[int, ...]
    starts: list[int] | None
    tensor: Tensor
    at: int


@dataclass(frozen=True)
class _Rectangle:
    """A rank's piece of a matrix: place, row, column and sizes in the matrix; where it lies in the tensor."""

    matrix: int  # number in the weight, expert by expert
    row: int
    column: int
    sizes: tuple[int, int]
    offset: int  # in the rank's elements of the weight
    row_stride: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.sizes[0] * self.sizes[1]


@dataclass
class _Slot:
    """Where the owner has a matrix: its place in a batch, and whether it lies there transposed."""

    batch: int
    place: int
    transposed: bool


@dataclass
class _Plan:
    """What this rank does in a call.

    batches: (matrices, rows, columns) of each. own: its pieces of its own matrices. sent, received: by rank,
    the pieces that go to owners, and those of its own matrices that come. returned: by rank, the pieces of
    its own matrices that go back. arriving: by rank, its pieces of their matrices.
    """

    batches: list[tuple[int, int, int]] = field(default_factory=list)
    own: list[tuple[Piece, _Rectangle, _Slot]] = field(default_factory=list)
    sent: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    received: dict[int, list[tuple[_Rectangle, _Slot]]] = field(default_factory=lambda: defaultdict(list))
    returned: dict[int, list[tuple[_Rectangle, _Slot]]] = field(default_factory=lambda: defaultdict(list))
    arriving: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    is_exchanged: bool = False


class MatrixExchange:
    """The `Solver` of a rank.

    group: the ranks of its pipeline stage. rows: coefficients of the steps. dtype: of the products and of
    what is sent. sent_bytes: by this rank to others, in all steps.
    """

    def __init__(
        self,
        weights: Iterable[SplitWeight],
        layout: Layout,
        group: dist.ProcessGroup,
        rows: list[Row],
        dtype: torch.dtype,
    ) -> None:
        self._layout, self._group, self._rows, self._dtype = layout, group, rows, dtype
        self._rank = dist.get_rank(group)
        self.tensors: dict[Tensor, list[SplitWeight]] = {}
        for weight in weights:
            self.tensors.setdefault(weight.tensor, []).append(weight)
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self.sent_bytes = 0

    @torch.no_grad()
    def solve(self, directions: Directions) -> Iterator[tuple[Piece, Tensor]]:
        """See `Solver`. All ranks of the stage must call it with the tensors of the same weights."""
        key = tuple(map(id, directions))
        if key not in self._plans:
            self._plans[key] = self._make_plan([each for t in directions for each in self.tensors[t]])
        plan = self._plans[key]
        sources = {tensor: value.to(self._dtype) for tensor, value in directions.items()}
        batches = [
            value.new_empty(sizes) for sizes in plan.batches for value in [next(iter(sources.values()))]
        ]
        for piece, rectangle, slot in plan.own:
            _in_batch(batches, rectangle, slot).copy_(piece.of(sources[piece.tensor]))
        if plan.is_exchanged:
            parts = {
                to: [each.of(sources[each.tensor]) for each in pieces] for to, pieces in plan.sent.items()
            }
            sizes = {rank: [each.sizes for each, _ in pieces] for rank, pieces in plan.received.items()}
            arrived = self._exchange(parts, sizes, next(iter(sources.values())))
            for rank, values in arrived.items():
                for (rectangle, slot), value in zip(plan.received[rank], values, strict=True):
                    _in_batch(batches, rectangle, slot).copy_(value)
        for number, matrices in enumerate(batches):
            batches[number] = orthogonalise(matrices, self._rows)
        for piece, rectangle, slot in plan.own:
            yield piece, _in_batch(batches, rectangle, slot)
        if plan.is_exchanged:
            parts = {
                to: [_in_batch(batches, *each) for each in pieces] for to, pieces in plan.returned.items()
            }
            sizes = {rank: [each.sizes for each in pieces] for rank, pieces in plan.arriving.items()}
            arrived = self._exchange(parts, sizes, next(iter(sources.values())))
            for rank, values in arrived.items():
                yield from zip(plan.arriving[rank], values, strict=True)

    def _exchange(
        self, parts: dict[int, list[Tensor]], sizes: dict[int, list[tuple[int, int]]], like: Tensor
    ) -> dict[int, list[Tensor]]:
        """Send matrices to ranks; return those of these sizes that come from each."""
        ranks = range(dist.get_world_size(self._group))
        out = [sum(part.numel() for part in parts.get(rank, ())) for rank in ranks]
        back = [sum(rows * columns for rows, columns in sizes.get(rank, ())) for rank in ranks]
        flat = [part.reshape(-1) for rank in ranks for part in parts.get(rank, ())]
        sent = torch.cat(flat) if flat else like.new_empty(0)
        received = like.new_empty(sum(back))
        dist.all_to_all_single(received, sent, back, out, group=self._group)
        self.sent_bytes += sent.numel() * sent.element_size()
        found = {}
        for rank, values in zip(ranks, received.split(back), strict=True):
            if rank in sizes:
                each = values.split([rows * columns for rows, columns in sizes[rank]])
                found[rank] = [value.view(size) for value, size in zip(each, sizes[rank], strict=True)]
        return found

    def _make_plan(self, weights: list[SplitWeight]) -> _Plan:
        plan, me = _Plan(), self._rank
        owners = self._owners(weights)
        mine: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # (weight, matrix) by shape
        for place, owner_of in enumerate(owners):
            for number, owner in enumerate(owner_of):
                if owner == me:
                    small, large = _matrix(weights[place], number).sizes
                    mine[small, large].append((place, number))
        slots: list[dict[int, _Slot]] = [{} for _ in weights]
        for (small, large), found in mine.items():
            most = max(1, MOST_ELEMENTS // (small * large))
            for first in range(0, len(found), most):
                together = found[first : first + most]
                for at, (place, number) in enumerate(together):
                    transposed = _matrix(weights[place], number).rows != small
                    slots[place][number] = _Slot(len(plan.batches), at, transposed)
                plan.batches.append((len(together), small, large))
        for place, weight in enumerate(weights):
            self._plan_weight(plan, weight, owners[place], slots[place])
        return plan

    def _plan_weight(
        self, plan: _Plan, weight: SplitWeight, owners: list[int], slots: dict[int, _Slot]
    ) -> None:
        me, holders = self._rank, self._holders(weight)
        plan.is_exchanged |= len(holders) > 1
        for rectangle in self._rectangles(weight, me):
            owner, matrix = owners[rectangle.matrix], _matrix(weight, rectangle.matrix)
            offset, shape = weight.at + rectangle.offset, (matrix.rows, matrix.columns)
            piece = Piece(weight.tensor, offset, rectangle.sizes, rectangle.row_stride, shape)
            if owner == me:
                plan.own.append((piece, rectangle, slots[rectangle.matrix]))
                continue
            plan.arriving[owner].append(piece)
            if self._sends(weight, me, owner):
                plan.sent[owner].append(piece)
        for rank in holders if slots else ():
            if rank == me:
                continue
            for rectangle in self._rectangles(weight, rank):
                if rectangle.matrix in slots:
                    plan.returned[rank].append((rectangle, slots[rectangle.matrix]))
                    if self._sends(weight, rank, me):
                        plan.received[rank].append((rectangle, slots[rectangle.matrix]))

    def _owners(self, weights: list[SplitWeight]) -> list[list[int]]:
        """Return the owner of each matrix of each weight, a rank of the stage.

        Experts come first: their ranks have equal work, which each rank knows of the others.
        """
        load = [0.0] * self._layout.stage_ranks
        owners = [[-1] * _num_matrices(weight) for weight in weights]
        work = [
            (weight.is_expert, flops(matrix.rows, matrix.columns, 1), -place, -number)
            for place, weight in enumerate(weights)
            for number in range(_num_matrices(weight))
            for matrix in [_matrix(weight, number)]
        ]
        for is_expert, cost, place, number in sorted(work, reverse=True):
            owner = min(self._holders(weights[-place]), key=lambda rank: (load[rank], rank))
            owners[-place][-number] = owner
            # The other expert ranks have an expert of this size, owned by the same copy and slice.
            for rank in self._alike(owner) if is_expert else (owner,):
                load[rank] += cost
        return owners

    def _alike(self, rank: int) -> range:
        """Return the ranks with other experts at a rank's copy and slice."""
        layout = self._layout
        first = rank // layout.expert_ranks * layout.expert_ranks + rank % layout.expert_tensor
        return range(first, first + layout.expert_ranks, layout.expert_tensor)

    def _holders(self, weight: SplitWeight) -> list[int]:
        """Return the ranks of the stage that hold parts of the same matrices as this rank."""
        layout = self._layout
        ranks = range(layout.stage_ranks)
        if not weight.is_expert:
            return list(ranks)
        mine = layout.expert_rank(self._rank)
        return [rank for rank in ranks if layout.expert_rank(rank) == mine]

    def _replica(self, weight: SplitWeight, rank: int) -> int:
        """Return which replica of its part of a weight a rank has."""
        return rank // (self._layout.expert_ranks if weight.is_expert else self._layout.tensor)

    def _sends(self, weight: SplitWeight, rank: int, owner: int) -> bool:
        """Return whether a holder sends its part to the owner; of equal replicas one does."""
        return weight.starts is not None or self._replica(weight, rank) == self._replica(weight, owner)

    def _rectangles(self, weight: SplitWeight, rank: int) -> Iterator[_Rectangle]:
        """Yield the pieces of a rank, in the order of its memory."""
        placement = weight.sharding.placement(weight.local_shape, self._layout, rank)
        start, stop = 0, Chunk((), weight.local_shape).numel
        if weight.starts is not None:
            replica = self._replica(weight, rank)
            start, stop = weight.starts[replica], weight.starts[replica + 1]
        at = 0
        for chunk in chunks_of_range(weight.local_shape, start, stop):
            yield from _in_matrices(weight, placement, chunk, at)
            at += chunk.numel


def _in_matrices(weight: SplitWeight, placement: Placement, chunk: Chunk, at: int) -> Iterator[_Rectangle]:
    """Yield the pieces of matrices in a contiguous chunk of a rank's part, whose memory begins at `at`."""
    *_, height, width = chunk.sizes
    for whole, inside in placement.global_chunks(chunk):
        *_, first_row, column = whole.offsets
        *_, num_rows, num_columns = whole.sizes
        *_, row_inside, column_inside = inside.offsets
        experts = range(whole.offsets[0], whole.offsets[0] + whole.sizes[0]) if weight.is_expert else (0,)
        for number, expert in enumerate(experts):
            memory = at + number * height * width
            for place, matrix in enumerate(weight.matrices):
                row = 0  # of the range in the matrix
                for each in matrix.ranges:
                    low, high = max(each.start, first_row), min(each.stop, first_row + num_rows)
                    if low < high:
                        yield _Rectangle(
                            expert * len(weight.matrices) + place,
                            row + low - each.start,
                            column,
                            (high - low, num_columns),
                            memory + (row_inside + low - first_row) * width + column_inside,
                            width,
                        )
                    row += len(each)


def split_weights(
    model: nn.Module,
    layout: Layout,
    stage: int,
    wrapper: Any,
    optimizer: torch.optim.Optimizer,
    chosen: set[nn.Parameter],
) -> Iterator[SplitWeight]:
    """Yield the weights that Muon updates, in the order in which the optimizer steps on them.

    stage: of ZeRO. wrapper: DeepSpeed's optimizer around `optimizer`, or that alone at stage 0. chosen: the
    model's parameters that Muon updates.

    Raises:
        CollectiveError: for a matrix of a single row or column.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    cut, fused = shardings(model), fused_weights(model)
    for parameter, tensor, starts, at in _held(stage, wrapper, optimizer, chosen):
        name, shape = names[parameter], whole_shape(parameter)
        sharding = replace(cut[name], expert=False)  # each rank counts its own experts from 0
        *_, rows, columns = sharding.placement(shape, layout, 0).global_shape
        matrices = matrices_of(rows, columns, *fused.get(name, ()))
        for matrix in matrices:
            if matrix.sizes[0] < LEAST:
                raise CollectiveError(
                    f"optimizer.name: muon: {name} is a matrix of {matrix.rows} x {matrix.columns}, expected "
                    f"at least {LEAST} rows and columns; leave it to AdamW with optimizer.groups: "
                    f"[{{pattern: '{re.escape(name)}', algorithm: adamw}}]"
                )
        yield SplitWeight(name, matrices, cut[name].expert, sharding, shape, starts, tensor, at)


def _held(
    stage: int, wrapper: Any, optimizer: torch.optim.Optimizer, chosen: set[nn.Parameter]
) -> Iterator[tuple[nn.Parameter, Tensor, list[int] | None, int]]:
    """Yield (parameter, what the optimizer steps on, starts, at); see `SplitWeight`."""
    if stage == 0:
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        parameters = getattr(optimizer, "model_parameters", tensors)
        for parameter, tensor in zip(parameters, tensors, strict=True):
            if parameter in chosen:
                yield parameter, tensor, None, 0
        return
    for each in slices_at_zero1(wrapper, optimizer) if stage < 3 else slices_at_zero3(wrapper):
        if each.parameter in chosen:
            yield each.parameter, each.flat, each.starts, each.at


def _num_matrices(weight: SplitWeight) -> int:
    return len(weight.matrices) * (weight.local_shape[0] if weight.is_expert else 1)


def _matrix(weight: SplitWeight, number: int) -> Matrix:
    return weight.matrices[number % len(weight.matrices)]


def _in_batch(batches: list[Tensor], rectangle: _Rectangle, slot: _Slot) -> Tensor:
    """Return the view of a piece of a matrix in its batch."""
    matrix = batches[slot.batch][slot.place]
    matrix = matrix.mT if slot.transposed else matrix
    (rows, columns), row, column = rectangle.sizes, rectangle.row, rectangle.column
    return matrix[row : row + rows, column : column + columns]
