"""`output_orthogonality`: lets the experts of a token give different outputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.choice import Kernels
from megamoe.kernels.experts.rows import RowTokens, combine
from megamoe.moe.capabilities import capabilities
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Pairs, Routing, count
from megamoe.moe.validation import experts_wanted
from megamoe.registry import register

SMALLEST = 1e-6  # added to the square that divides


@register("loss", "output_orthogonality")
class OutputOrthogonality(Part):
    """Mean over tokens of sum_(j != k) |projection of o_j on o_k|^2 = (o_j . o_k)^2 / (o_k . o_k + 1e-6).

    o_j: the output of the token's j-th expert, without its weight; the pairs are ordered, so each two experts
    count twice. It teaches the experts alone. Scope: tokens.

    Source: Guo et al. 2025 (arXiv 2505.22323), section 3.1, eq. 6, orthogonality loss L_o.

    Caveats: the paper sums over the tokens; ours is their mean, so that the weight does not depend on the
    batch. Its squared norm has o_k . o_k / (o_k . o_k + epsilon) as a further factor. Every pair is a row of
    its own on its way back, so that `by_node` sends as many rows between nodes as `direct`. A token that has
    an expert twice (independent tables) counts it as two.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 0.001

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"fixed_shares": "whose rows are not those of the pairs; set capacity.pad to false"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        if experts_wanted(moe) == 1 and "fixed_count" in capabilities(moe.router.selector):
            raise ValueError("a token has one expert, which has no other to differ from; leave the loss out")

    def attach(self, layer: Any) -> None:
        """Let the dispatch send a row for each pair, and read the outputs before they are added up."""
        dispatcher, kernels = layer.dispatcher, layer.router.dims.kernels
        start, combine, combine_weighted = dispatcher.start, dispatcher.combine, dispatcher.combine_weighted
        self._token_sharding = layer.token_sharding

        def start_of_pairs(hidden_TH: Tensor, routing: Routing) -> Any:
            state = start(*one_row_each(hidden_TH, routing))
            self._sent[id(state)] = routing
            return state

        def read(join: Callable[[Tensor, Any], Tensor], rows_NH: Tensor, state: Any) -> Tensor:
            output_NH, sent = join(rows_NH, state), self._sent.pop(id(state))
            self._overlap_T = self._of_tokens(output_NH, sent.pairs, sent.num_tokens)
            return weighted_sum(output_NH, sent, kernels)

        self._sent: dict[int, Routing] = {}  # by the dispatch's state: passes may take turns
        dispatcher.start = start_of_pairs
        dispatcher.combine, dispatcher.combine_weighted = (
            partial(read, combine),
            partial(read, combine_weighted),
        )

    def _of_tokens(self, output_NH: Tensor, pairs: Pairs, num_tokens: int) -> Tensor:
        """Return each token's sum, fp32 [T]. The host waits for the device unless all tokens have as many
        pairs.
        """
        most = pairs.each or self._most(pairs, num_tokens)
        rows_NH = output_NH.float()
        if pairs.each is None:
            number_T = count(pairs.token_N, num_tokens)
            first_T = number_T.cumsum(0) - number_T
            number_N = torch.arange(len(rows_NH), device=rows_NH.device)
            place_N = pairs.token_N * most + number_N - first_T[pairs.token_N]  # they are sorted by token
            rows_NH = rows_NH.new_zeros(num_tokens * most, rows_NH.shape[1]).index_copy(0, place_N, rows_NH)
        rows_TKH = rows_NH.view(num_tokens, most, rows_NH.shape[1])
        products_TKK = rows_TKH @ rows_TKH.mT
        square_TK = products_TKK.diagonal(dim1=-2, dim2=-1)
        own_KK = torch.eye(most, dtype=torch.bool, device=rows_NH.device)
        others_TKK = products_TKK.masked_fill(own_KK, 0.0).square()
        return (others_TKK / (square_TK[:, None, :] + SMALLEST)).sum((-2, -1))

    def _most(self, pairs: Pairs, num_tokens: int) -> int:
        return int(count(pairs.token_N, num_tokens).max()) if num_tokens else 0

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        overlap_T = self._token_sharding.all_gather(self._overlap_T, context)
        return overlap_T.sum() / max(routing.num_tokens, 1)


def one_row_each(rows_TH: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    """Return a row for each pair, and the routing in which each pair is a token of its own with weight 1.

    What a dispatch combines by it are the outputs of single experts, in the order of the pairs.
    """
    pairs, num_experts = routing.pairs, routing.num_experts
    number_N = torch.arange(len(pairs.token_N), device=pairs.token_N.device)
    single = replace(pairs, token_N=number_N, weight_N=torch.ones_like(pairs.weight_N), each=1)
    single.weight_N.requires_grad_(False)
    nothing_NE = routing.scores_TE.detach().new_zeros(()).expand(len(number_N), num_experts)
    sent = replace(routing, scores_TE=nothing_NE, wanted=single, pairs=single)
    return rows_TH.index_select(0, pairs.token_N), sent


def weighted_sum(output_NH: Tensor, routing: Routing, kernels: Kernels) -> Tensor:
    """Return each token's sum of the outputs of its pairs times their weights, [T, H]."""
    pairs = routing.pairs
    rows = RowTokens.of(pairs.token_N, routing.num_tokens, kernels)
    return combine(output_NH, pairs.weight_N, rows, kernels)
