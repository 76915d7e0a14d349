"""`sparse_mixer`: experts drawn from softmax(s), with a third-order estimate of the choice's gradient."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.kernels.autograd import Function
from megamoe.kernels.router import largest
from megamoe.moe import rng
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.moe.selectors.choices import FixedK
from megamoe.registry import register


@register("selector", "sparse_mixer")
class SparseMixer(FixedK):
    """k experts in turn, each drawn from the softmax of the scores near the largest, its weight.

    For each choice, experts with (max s - s) / max(|s|, max s) > 2 epsilon are left out, with the experts
    chosen before. Let q be the softmax of the others. In training an expert is drawn from q, in evaluation
    it is the most probable; its weight is q. If the draw is not the most probable, the weight's value is
    multiplied by 1 with probability 1/4 and by 1/3 otherwise, and its derivative stays that of q: Heun's
    third-order estimate of the gradient of a sampled choice.

    Source: Liu et al. 2024 (GRIN, arXiv 2409.12136), and the authors' code (github.com/microsoft/SparseMixer,
    sparsemixer_v2.py), with which the draws, the factors and the gradient were compared; it writes 0.3333 for
    1/3. The numbers are those of Phi-3.5-MoE.

    Caveats: the paper's text was not at hand for its equations. Phi-3.5-MoE has k = 2; ours repeats the rule
    for any k. A score function's temperature, bias and masks by p have no place in it: it is a rule on
    scores.
    """

    @dataclass
    class Config(FixedK.Config):
        """k: experts per token. epsilon: the paper's r, half of the relative distance that is left out."""

        k: int = 2
        epsilon: float = 0.01

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.epsilon > 0:
                raise ValueError("epsilon must be positive: at 0 one expert would remain, of weight 1")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"fixed_count"}

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"plain_softmax": "since the draws and the weights are of the softmax of the scores"}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {
            "bias": "which does not reach the scores that experts are drawn from",
            "mask": "and q would be of experts that were taken away",
        }

    @classmethod
    def replays(cls, options: Config) -> bool:
        return False  # the weights depend on draws beside the choice

    def replayed(self, scored: Scored, expert_TK: Tensor, count_T: Tensor) -> Pairs:
        """Raise NotImplementedError."""
        raise NotImplementedError("sparse_mixer cannot replay choices: its weights depend on more draws")

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """Return T * k pairs, in the order in which they were chosen."""
        left_TE, chosen = scored.scores_TE, []
        for choice in range(self.config.k):
            expert_T1, weight_T1 = self._choose(left_TE, context, choice)
            chosen.append((expert_T1, weight_T1))
            left_TE = left_TE.scatter(1, expert_T1, float("-inf"))
        experts, weights = zip(*chosen, strict=True)
        return Pairs.of_choices(torch.cat(experts, dim=1), torch.cat(weights, dim=1))

    def _choose(self, scores_TE: Tensor, context: StepContext, choice: int) -> tuple[Tensor, Tensor]:
        fixed_TE = scores_TE.detach()
        best_T1 = largest(fixed_TE, 1)
        most_T1 = fixed_TE.gather(1, best_T1)
        distance_TE = (most_T1 - fixed_TE) / fixed_TE.abs().maximum(most_T1)
        # Not `distance > bound`: it is NaN for an expert that was chosen before, and where all scores are 0.
        near_TE = (distance_TE <= 2 * self.config.epsilon) | (fixed_TE == most_T1)
        near_TE = scores_TE.masked_fill(~near_TE, float("-inf"))
        q_TE = near_TE.softmax(dim=-1)
        if not self.training:
            return best_T1, q_TE.gather(1, best_T1)
        num_experts = scores_TE.shape[1]
        gumbel_TE = self.draws(context, f"sparse mixer {choice}", scores_TE, num_experts, rng.gumbel)
        drawn_T1 = largest(near_TE.detach() + gumbel_TE, 1)
        is_full_T1 = self.draws(context, f"sparse mixer scale {choice}", scores_TE, 1) > 0.75
        factor_T1 = torch.where((drawn_T1 == best_T1) | is_full_T1, 1.0, 1 / 3)
        weight_T1: Tensor = _ScaledValue.apply(q_TE.gather(1, drawn_T1), factor_T1)
        return drawn_T1, weight_T1


class _ScaledValue(Function):
    """Value times factor; the gradient is that of the value itself."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: Tensor) -> Tensor:
        return value * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
