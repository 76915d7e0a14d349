"""The exchange `by_node`: a row crosses to another node once, however many of its experts are there.

The S nodes of an expert-parallel group hold L ranks of it each. A token's row goes to each node that has
experts of the token, to the rank there with the sender's number within its node. That rank copies it to the
ranks of the experts, as `direct` does among them. On the way back it sums the weighted outputs of the
token's experts on its node in fp32, and one row returns, which the sender adds to those of other nodes. The
gradients take the same ways in reverse, so they too cross once.

With the rows travel the pairs: the number of the row, the expert, and the weight, whose gradient returns.
Sources: DeepSeek-V3, section 3.2.2; Megatron-Core's and DeepEP's exchanges by node.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.compat.torch_compat import assert_on_device
from megamoe.kernels.experts.rows import Order, RowTokens, permute, sum_rows
from megamoe.moe.dispatch.direct import DirectDispatch, DirectState
from megamoe.moe.dispatch.dispatcher import DispatchConfig, Dispatcher, ReadCounts, read_counts
from megamoe.moe.dispatch.transfer import Rows, Transfer
from megamoe.moe.process_groups import ParallelGroups, rank_in, size_of
from megamoe.moe.routing import Pairs, Routing


@dataclass
class NodeState:
    """How the rows of one micro batch are moved, to bring them back.

    sent: the tokens of the rows that leave, sorted by node; None if all stay on this rank. order_N: the pairs
    sorted by node. rows, pairs: the exchanges between nodes. arriving: the rows' placeholder. pairs_M: the
    pairs that arrived. inside: the state of the exchange inside the node, with counts_XSL and numbers for it.
    """

    sent: RowTokens | None
    order_N: Order
    rows: Transfer | None = None
    pairs: Transfer | None = None
    arriving: Rows | None = None
    pairs_M: Pairs | None = None
    counts_XSL: Tensor | None = None
    numbers: dict[str, list[int]] | None = None
    inside: DirectState | None = None


class ByNodeDispatch(Dispatcher):
    """The exchange by nodes, over `groups.between_nodes` and `groups.inside_node`.

    read_counts: as of `DirectDispatch`, with four more vectors: `rows_sent` and `rows_received`,
    `pairs_sent` and `pairs_received`, of each node; the others are of the ranks in the node.
    """

    sends_weights = True

    @classmethod
    def build(cls, config: Any, settings: DispatchConfig) -> Dispatcher:
        """Return the exchange by node, or the direct one if all experts are on one node."""
        if settings.groups.between_nodes is None:
            return DirectDispatch(config, settings)
        return super().build(config, settings)

    def __init__(self, config: Any, settings: DispatchConfig) -> None:
        super().__init__(config, settings)
        groups = settings.groups
        assert groups.between_nodes is not None, "all experts are on one node"
        self.between = groups.between_nodes
        self.num_nodes, self.node = size_of(self.between), rank_in(self.between)
        self.node_experts = settings.num_experts // self.num_nodes
        self.fp8 = settings.fp8
        in_node = ParallelGroups(expert=groups.inside_node, expert_tensor=groups.expert_tensor)
        self.inside = DirectDispatch(None, replace(settings, num_experts=self.node_experts, groups=in_node))
        self.inside.interleaves = False
        self.read_counts: ReadCounts = read_counts

    def start(self, hidden_TH: Tensor, routing: Routing) -> NodeState:
        """See `Dispatcher`.

        Raises:
            RuntimeError: as of `DirectDispatch.start`.
        """
        pairs, counts_SE = routing.pairs, routing.counts_E().view(self.num_nodes, -1)
        node_N, expert_N = pairs.expert_N // self.node_experts, pairs.expert_N % self.node_experts
        order_N = Order.by_key(node_N, self.num_nodes, self.kernels)
        if routing.is_local:
            return self._start_at_home(hidden_TH, pairs, expert_N, counts_SE, order_N)
        place_ST, counts_S = _places(pairs.token_N, node_N, self.num_nodes, routing.num_tokens)
        sent_SC = torch.cat((counts_SE, counts_S[:, None]), dim=1)
        arrived_SC = torch.empty_like(sent_SC)
        dist.all_to_all_single(arrived_SC, sent_SC, group=self.between)
        arrived_SE, arrived_S = arrived_SC[:, :-1], arrived_SC[:, -1]
        state = NodeState(None, order_N)
        state.counts_XSL, to_read = self.inside.exchange_counts(arrived_SE.sum(0), is_local=False)
        numbers = self.read_counts(
            {
                "rows_sent": counts_S,
                "rows_received": arrived_S,
                "pairs_sent": counts_SE.sum(1),
                "pairs_received": arrived_SE.sum(1),
                **to_read,
            }
        )
        state.numbers = numbers
        token_U = _tokens_of_rows(place_ST, counts_S, sum(numbers["rows_sent"]))
        state.sent = RowTokens.of(token_U, routing.num_tokens, self.kernels)
        state.rows = Transfer(numbers["rows_sent"], numbers["rows_received"], self.between, interleaves=True)
        state.pairs = Transfer(numbers["pairs_sent"], numbers["pairs_received"], self.between)
        row_N = place_ST.view(-1).index_select(0, node_N * routing.num_tokens + pairs.token_N) - 1
        numbers_N = (row_N * self.node_experts + expert_N).index_select(0, order_N.order_N)
        numbers_M = state.pairs.run(numbers_N)
        first_M = torch.repeat_interleave(
            arrived_S.cumsum(0) - arrived_S, arrived_SE.sum(1), output_size=len(numbers_M)
        )
        weight_M = state.pairs.run(permute(pairs.weight_N, order_N))
        token_M = numbers_M // self.node_experts + first_M
        state.pairs_M = Pairs(token_M, numbers_M % self.node_experts, weight_M, torch.zeros_like(token_M))
        state.arriving = state.rows.start(Rows.of(hidden_TH, self.fp8).gathered(state.sent, self.kernels))
        return state

    def _start_at_home(
        self, hidden_TH: Tensor, pairs: Pairs, expert_N: Tensor, counts_SE: Tensor, order_N: Order
    ) -> NodeState:
        counts_E = counts_SE[self.node]
        counts_XSL, to_read = self.inside.exchange_counts(counts_E, is_local=True)
        all_here = counts_XSL[self.inside.slice].sum() == len(pairs.token_N)
        assert_on_device(all_here, "is_local, but a pair's expert is on another rank")
        numbers = self.read_counts(to_read) if to_read else {}
        here = Pairs(pairs.token_N, expert_N, pairs.weight_N, pairs.choice_N)
        inside = self.inside.start_pairs(Rows(hidden_TH), here, self.node_experts, counts_XSL, numbers)
        return NodeState(None, order_N, inside=inside)

    def finish(self, state: NodeState) -> tuple[Tensor, Tensor]:
        """See `Dispatcher`."""
        if state.inside is None:
            assert state.rows is not None and state.arriving is not None
            assert state.pairs_M is not None and state.counts_XSL is not None and state.numbers is not None
            rows_U = state.rows.finish(state.arriving)
            state.inside = self.inside.start_pairs(
                rows_U, state.pairs_M, self.node_experts, state.counts_XSL, state.numbers
            )
            state.arriving = state.pairs_M = None
        return self.inside.finish(state.inside)

    def host_counts(self, state: NodeState) -> Tensor | None:
        """See `Dispatcher`."""
        assert state.inside is not None
        return self.inside.host_counts(state.inside)

    def dispatch_values(self, values_N: Tensor, state: NodeState) -> Tensor:
        """See `Dispatcher`; the same exchanges once more."""
        assert state.inside is not None
        if state.pairs is not None:
            values_N = state.pairs.run(values_N.index_select(0, state.order_N.order_N))
        return self.inside.dispatch_values(values_N, state.inside)

    def combine(self, rows_MH: Tensor, state: NodeState) -> Tensor:
        """See `Dispatcher`; the sum of each node is rounded to the model's dtype before it returns."""
        assert state.inside is not None
        return self._between_nodes(self.inside.combine(rows_MH, state.inside), state)

    def dispatched_weights(self, state: NodeState) -> Tensor:
        """See `Dispatcher`; to the nodes they have travelled with the pairs."""
        assert state.inside is not None
        return self.inside.dispatched_weights(state.inside)

    def combine_weighted(self, rows_MH: Tensor, state: NodeState) -> Tensor:
        """See `Dispatcher`, and `combine`."""
        assert state.inside is not None
        return self._between_nodes(self.inside.combine_weighted(rows_MH, state.inside), state)

    def _between_nodes(self, rows_UH: Tensor, state: NodeState) -> Tensor:
        if state.rows is None or state.sent is None:
            return rows_UH
        back = Transfer(state.rows.received, state.rows.sent, self.between, interleaves=True)
        return sum_rows(back.run(rows_UH), state.sent, self.kernels)


def _places(token_N: Tensor, node_N: Tensor, nodes: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return the place of each token's row among those for each node, counted from 1, and their numbers.

    place_ST: int64; where a token has no expert on the node, the place of the row before. counts_S: int64.
    """
    present_ST = token_N.new_zeros(nodes, tokens)
    present_ST.view(-1).index_fill_(0, node_N * tokens + token_N, 1)
    return present_ST.cumsum(1), present_ST.sum(1)


def _tokens_of_rows(place_ST: Tensor, counts_S: Tensor, rows: int) -> Tensor:
    """Return the tokens of the rows, sorted by node, then by token: int64 [rows]; without a wait."""
    nodes, tokens = place_ST.shape
    is_row_ST = place_ST.diff(dim=1, prepend=place_ST.new_zeros(nodes, 1)) > 0
    first_S1 = (counts_S.cumsum(0) - counts_S)[:, None]
    target_ST = (place_ST - 1 + first_S1).masked_fill(~is_row_ST, rows)  # the others write to one place more
    token_ST = torch.arange(tokens, device=place_ST.device).expand(nodes, tokens)
    found = place_ST.new_empty(rows + 1).scatter_(0, target_ST.reshape(-1), token_ST.reshape(-1))
    return found[:rows]
