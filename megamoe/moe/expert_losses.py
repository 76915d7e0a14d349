"""The base classes of losses that see the experts: their outputs, or what they make of given rows.

The layer puts what they ask for into the routing's extras, under the loss's `extra`, before it calls them.
"""

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from megamoe.kernels.choice import Kernels
from megamoe.kernels.experts.rows import RowTokens, combine
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Pairs, Routing


class ExpertLoss(Part):
    """A loss that teaches the experts. extra: where it finds what the layer has prepared for it."""

    extra: ClassVar[str]


class OutputLoss(ExpertLoss):
    """A loss of the experts' outputs, by a value of each token: the name of `extra` ends in T.

    `of_tokens` is called on the rank that holds the tokens, with every layout and exchange; `forward` then
    finds the values of the whole micro batch, fp32 [T]. Outputs are those before the projection back from a
    latent space and without the pairs' weights. Experts without computation have none.
    """

    def of_tokens(self, output_NH: Tensor, pairs: Pairs, num_tokens: int) -> Tensor:
        """Return a value of each token, fp32 [T]; output_NH: the outputs of `pairs`, in their order."""
        raise NotImplementedError(f"{type(self).__name__} must define of_tokens")


class ActivationLoss(ExpertLoss):
    """A loss of what each expert's first product makes of a few rows.

    `forward` finds norm_PE (fp32) as the extra: the L2 norms of the products of row p with the first weight
    of expert e, of its gate where it has one, before the activation and without a bias.
    """

    extra = "norm_PE"

    def rows_PH(self, routing: Routing, context: StepContext) -> Tensor:
        """Return the rows, fp32 [P, H], the same on all ranks."""
        raise NotImplementedError(f"{type(self).__name__} must define rows_PH")


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
    return combine(
        output_NH, pairs.weight_N, RowTokens.of(pairs.token_N, routing.num_tokens, kernels), kernels
    )
