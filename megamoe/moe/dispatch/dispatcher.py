"""The interface of a dispatch, and the one of a rank that holds every expert whole."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.experts.rows import RowTokens, combine, gather, group_pairs, sum_rows
from megamoe.moe.process_groups import ParallelGroups
from megamoe.moe.routing import Pairs, Routing

NodeUse = Literal["none", "if_worth", "always"]


@dataclass(frozen=True)
class DispatchConfig:
    """What a dispatch is built with.

    num_experts: of the layer; rank r of `groups.expert` holds experts r*E/R .. (r+1)*E/R - 1. groups: the
    process groups of the layer. kernels: the model's choice. fp8: whether rows are sent to the experts in 8
    bits (`parallel.exchange_dtype`); a dispatch that cannot says so with a UserError. host_counts: whether
    the experts' products read their counts on the host: a dispatch that reads others reads these with them.
    """

    num_experts: int
    groups: ParallelGroups
    kernels: Kernels = DEFAULT_KERNELS
    fp8: bool = False
    host_counts: bool = False


ExpertPlaces = DispatchConfig  # the name that earlier plugins import


class Dispatcher:
    """Sends the rows of one MoE layer to their experts, and the experts' outputs back.

    Register a subclass as `@register("exchange", "my_name")` with a nested dataclass `Config`, and choose it
    by `parallel.exchange: {name: my_name, ...}`. The layer calls, in each forward pass and in this order,
    `start`, `finish`, `dispatch_values` if experts have dropout, and `combine`. Between `start` and `finish`
    it computes the shared experts, so what `start` sends can travel meanwhile. All results carry gradients,
    to the tokens, the experts and the weights of the pairs. Shapes: T tokens of this rank, N pairs of them, M
    rows for the experts of this rank, H the hidden size.

    knows_slots: whether `start` knows `Routing.slots`. sends_weights: whether it has `dispatched_weights` and
    `combine_weighted`, which `moe.weights_in_activation` needs in place of `combine`. node_use: whether
    `settings.groups` has the groups by node: never, where that saves enough, or always.
    """

    knows_slots: bool = False
    sends_weights: bool = False
    node_use: NodeUse = "none"

    @dataclass
    class Config:
        """No options."""

    def __init__(self, config: Any, settings: DispatchConfig) -> None:
        self.kernels = settings.kernels

    @classmethod
    def build(cls, config: Any, settings: DispatchConfig) -> "Dispatcher":
        """Return the dispatch of a layer whose experts are spread over ranks."""
        return cls(config, settings)

    def start(self, hidden_TH: Tensor, routing: Routing) -> Any:
        """Begin to send the rows of `routing.pairs`; return the state of this pass, for the other methods.

        hidden_TH: in the model's dtype. `routing.is_local`: all pairs' experts are on this rank.
        """
        raise NotImplementedError

    def finish(self, state: Any) -> tuple[Tensor, Tensor]:
        """Return rows_MH, grouped by this rank's experts, and their counts, int64 [experts of this rank]."""
        raise NotImplementedError

    def host_counts(self, state: Any) -> Tensor | None:
        """Return the counts of `finish` on the host, if they were read there; else None."""
        return None

    def dispatch_values(self, values_N: Tensor, state: Any) -> Tensor:
        """Send int64 values of `routing.pairs` the same way: those of the rows of `finish`, in their order,
        without gradient.
        """
        raise NotImplementedError

    def combine(self, rows_MH: Tensor, state: Any) -> Tensor:
        """Return each token's sum of its experts' outputs times the pairs' weights, [T, H] in their dtype,
        summed in fp32; 0 for a token without pairs.
        """
        raise NotImplementedError

    def dispatched_weights(self, state: Any) -> Tensor:
        """Return the pairs' weights for the rows of `finish`, fp32 [M] in their order, with gradients."""
        raise NotImplementedError

    def combine_weighted(self, rows_MH: Tensor, state: Any) -> Tensor:
        """Compute `combine` of rows that already have their weights; nothing is kept for the backward
        pass.
        """
        raise NotImplementedError

    def dispatch(self, hidden_TH: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Any]:
        """Return the rows and counts of `finish`, and the state."""
        state = self.start(hidden_TH, routing)
        return *self.finish(state), state


@dataclass
class SortedPairs:
    """The pairs of one micro batch sorted by expert: their tokens, weights, and old numbers.

    hidden_TH, counts_E: what a dispatch that sends nothing needs. num_tokens: of the output.
    """

    rows: RowTokens
    weight_N: Tensor
    order_N: Tensor
    hidden_TH: Tensor
    counts_E: Tensor
    num_tokens: int


class LocalDispatch(Dispatcher):
    """All experts are here: one stable sort of the pairs by expert."""

    sends_weights = True

    def __init__(self, config: None = None, settings: DispatchConfig | None = None) -> None:
        super().__init__(config, settings or DispatchConfig(0, ParallelGroups()))

    def start(self, hidden_TH: Tensor, routing: Routing) -> SortedPairs:
        """See `Dispatcher`."""
        if routing.slots is not None:
            rows, hidden_TH = rows_of_slots(hidden_TH, routing, self.kernels)
            rows_E = torch.full((routing.num_experts,), routing.slots, device=hidden_TH.device)
            return SortedPairs(*rows, hidden_TH, rows_E, routing.num_tokens)
        sizes = (routing.num_tokens, routing.num_experts)
        found, counts_E = sort_by_expert(routing.pairs, sizes, self.kernels)
        if counts_E is not None:
            routing.remember_counts(counts_E)
        return SortedPairs(*found, hidden_TH, routing.counts_E(), routing.num_tokens)

    def finish(self, state: SortedPairs) -> tuple[Tensor, Tensor]:
        """See `Dispatcher`."""
        return gather(state.hidden_TH, state.rows, self.kernels), state.counts_E

    def dispatch_values(self, values_N: Tensor, state: SortedPairs) -> Tensor:
        """See `Dispatcher`."""
        return values_N.index_select(0, state.order_N)

    def combine(self, rows_MH: Tensor, state: SortedPairs) -> Tensor:
        """See `Dispatcher`."""
        return of_tokens(combine(rows_MH, state.weight_N, state.rows, self.kernels), state.num_tokens)

    def dispatched_weights(self, state: SortedPairs) -> Tensor:
        """See `Dispatcher`."""
        return state.weight_N

    def combine_weighted(self, rows_MH: Tensor, state: SortedPairs) -> Tensor:
        """See `Dispatcher`."""
        return of_tokens(sum_rows(rows_MH, state.rows, self.kernels), state.num_tokens)


def rows_of_slots(
    hidden_TH: Tensor, routing: Routing, kernels: Kernels
) -> tuple[tuple[RowTokens, Tensor, Tensor], Tensor]:
    """Return what `sort_by_expert` does, of pairs in fixed shares, and the tokens with one more, of zeros.

    Nobody reads the sum of the rows of zeros, and kernels do not compute it: it can have thousands of rows,
    which one program on CUDA or one thread would add one by one.
    """
    pairs, num_tokens = routing.pairs, routing.num_tokens
    rows = RowTokens.of(pairs.token_N, num_tokens + 1, kernels)
    if rows.ends_T is not None:
        rows.ends_T[num_tokens] = rows.ends_T[num_tokens - 1] if num_tokens else 0
    order_N = torch.arange(len(pairs.token_N), device=pairs.token_N.device)
    hidden_TH = torch.cat((hidden_TH, hidden_TH.new_zeros(1, hidden_TH.shape[1])))
    return (rows, pairs.weight_N, order_N), hidden_TH


def of_tokens(output_TH: Tensor, num_tokens: int) -> Tensor:
    """Return the sums without that of the token of zeros, if there is one (`rows_of_slots`).

    A slice of everything would cost two passes over the gradient.
    """
    return output_TH if len(output_TH) == num_tokens else output_TH[:num_tokens]


def sort_by_expert(
    pairs: Pairs, sizes: tuple[int, int], kernels: Kernels
) -> tuple[tuple[RowTokens, Tensor, Tensor], Tensor | None]:
    """Sort pairs by expert, stably; sizes: tokens and experts.

    Returns:
        ((tokens of the rows, weight_N, order_N: each row's pair), counts_E if the sort has counted them).
    """
    grouped = group_pairs(pairs.token_N, pairs.expert_N, pairs.weight_N, sizes, kernels)
    return (grouped.rows, grouped.weight_N, grouped.order_N), grouped.counts_E


ReadCounts = Callable[[Mapping[str, Tensor]], dict[str, list[int]]]


def read_counts(counts: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Copy int64 vectors to the host in one copy, for which it waits."""
    sizes = [len(vector) for vector in counts.values()]
    parts = torch.cat([*counts.values()]).cpu().split(sizes)
    return {name: part.tolist() for name, part in zip(counts, parts, strict=True)}
