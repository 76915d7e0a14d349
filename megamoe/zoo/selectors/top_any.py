"""`top_any`: each expert has a learned threshold, and takes the tokens whose probability exceeds it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamoe.moe.part import Dims, Selector, StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import valid_TK
from megamoe.registry import register


@register("selector", "top_any")
class TopAny(Selector):
    """All candidates with p_e > sigmoid(G_e), G_e learned; a token without any goes to its best expert.

    The outputs of a token's m experts are averaged: each has weight 1/m. The gradient of the choice is
    straight-through: the backward pass takes m times the weight for p_e - sigmoid(G_e). So p and G learn
    from the experts that were chosen. All G start at logit(start).

    Source: Guo et al. 2024 (DynMoE, arXiv 2405.14297), top-any gating, and the authors' code
    (github.com/LINs-lab/DynMoE, gated_multi_gate_t.py): its G start at 0, a threshold of 0.5.

    Caveats: the paper's text was not at hand for its equations. The code multiplies G by the temperature of
    the scores; ours does not. The paper scores by the cosine and a sigmoid (`scorer: cosine`); any
    elementwise score function without zeros will do here. Its adding and removing of experts while training
    is not implemented; the number of experts stays. The paper gives the best expert to tokens without any in
    evaluation only; ours have it in training too, so that no token is lost. It leaves the derivative of 1/m
    open; ours takes m as constant. The code's loss on the router's weight is not implemented.
    """

    @dataclass
    class Config:
        """start: the threshold of every expert at first, between 0 and 1."""

        start: float = 0.5

        def __post_init__(self) -> None:
            if not 0 < self.start < 1:
                raise ValueError("start must lie between 0 and 1, as the p of a sigmoid do")

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"elementwise": "since each expert's p is compared with a threshold of its own"}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"bias": "which moves no threshold"}

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        logit = torch.logit(torch.tensor(float(config.start), device="cpu")).item()
        self.threshold = nn.Parameter(torch.full((dims.num_experts,), logit))

    def metrics(self) -> dict[str, Tensor]:
        """Return the mean threshold, sigmoid(G)."""
        return {"threshold": self.threshold.float().sigmoid().mean()}

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """Return at least one pair per token."""
        threshold_E = self.threshold.detach().float().sigmoid()
        chosen_TE = scored.of_candidates_TE(scored.probs_TE.detach(), 0.0, self.dims.kernels) > threshold_E
        # The best first; it counts alone where nothing is chosen.
        order_TE = scored.ranking_TE.masked_fill(~chosen_TE, float("-inf"))
        order_TE = order_TE.where(chosen_TE.any(dim=-1, keepdim=True), scored.ranking_TE)
        expert_TE = order_TE.argsort(dim=-1, descending=True, stable=True)
        return self.replayed(scored, expert_TE, chosen_TE.sum(dim=-1).clamp_min(1))

    def replayed(self, scored: Scored, expert_TK: Tensor, count_T: Tensor) -> Pairs:
        """Return the pairs of these choices, of weight 1/m."""
        margin_TK = scored.probs_TE.gather(1, expert_TK) - self.threshold.float().sigmoid()[expert_TK]
        one_TK = 1 + (margin_TK - margin_TK.detach())
        weight_TK = one_TK / count_T.clamp_min(1)[:, None]
        return Pairs.of_choices(expert_TK, weight_TK, valid_TK(expert_TK, count_T))
