"""`drop_rate_balance`: a balance loss whose coefficient follows the share of dropped pairs."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import balance
from megamoe.moe.losses.common import shares
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.validation import refuse_all_chosen, refuse_even_selector
from megamoe.registry import register
from megamoe.zoo.losses.adaptive import AdaptiveLoss


@register("loss", "drop_rate_balance")
class DropRateBalance(AdaptiveLoss):
    """E * sum_i f_i P_i with a coefficient that rises with the drop rate d; f and P of the micro batch.

    After each step alpha becomes beta alpha + (1 - beta) min(xi d, most). d is the share of the wanted
    pairs of the whole batch that the capacity dropped in this layer. alpha starts at `weight`. f_i: the
    fraction of the wanted pairs that go to expert i, without gradient. P_i: the mean of p_i over the tokens,
    each divided by the token's sum.

    Source: Wei et al. 2024 (Skywork-MoE, arXiv 2406.06563), section 4.2, eq. 7-9; xi 1/5, beta 0.99, most
    (alpha_max) 0.01.

    Caveats: the paper gives no first alpha. Evaluation changes nothing.
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: alpha at first, factor in the total loss. xi: the coefficient per drop rate. beta: of the
        moving average. most: the limit of the coefficient.
        """

        weight: float = 0.01
        xi: float = 0.2
        beta: float = 0.99
        most: float = 0.01

        def __post_init__(self) -> None:
            if not 0 <= self.beta < 1:
                raise ValueError("beta must be at least 0 and under 1")
            if not (self.xi > 0 and self.most > 0):
                raise ValueError("xi and most must be positive")

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"dropless": "so that the drop rate is always 0 and the coefficient falls to 0"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        refuse_even_selector(moe)
        refuse_all_chosen(moe)

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        wanted_E = routing.wanted_counts_E()
        wanted = wanted_E.sum()  # counted: with fixed shares the pairs include empty places
        self.remember([wanted - routing.counts_E().sum(), wanted], context)
        loss = balance(shares(routing.probs_TE), wanted_E, self.dims.kernels)
        return loss * self.coefficient.float().clone()  # a copy: the buffer changes in place

    def adapted(self, coefficient: Tensor, total: Tensor) -> Tensor:
        """Move the coefficient towards xi d."""
        if self.config.weight == 0:  # the loss is only logged
            return coefficient
        dropped, wanted = total.double().unbind()
        target = (self.config.xi * dropped / wanted.clamp_min(1)).clamp_max(self.config.most)
        share = self.config.beta
        return share * coefficient + ((1 - share) / self.config.weight * target).float()
