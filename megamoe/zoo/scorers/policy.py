"""`policy`: routing as a stochastic policy, for the loss `grpo`. Experimental."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.moe.part import Dims, StepContext
from megamoe.moe.scorers.common import RowScorer
from megamoe.registry import register


@register("scorer", "policy")
class PolicyScorer(RowScorer):
    """pi(e | u) = softmax(W u); in training the experts are drawn from pi_old, otherwise the k largest are
    taken.

    pi_old and pi_reference are the same map with the weights of an earlier step, in buffers [E, H]. The
    selector `sample` draws from pi_old, so that the loss can measure how pi has changed since. `grpo` keeps
    pi close to pi_reference. Both read the hidden states of the current model. A pair's weight is pi, so the
    scorer also learns from the language model's loss.

    Source: the slides' "RL-based expert routing" g = pi(e | u), with GRPO (Shao et al. 2024) as its
    objective.

    Caveats: the slides ascribe this to DeepSeek-R1, whose paper does not describe it. They give no
    architecture of the policy; a linear map is our reading. Experimental.
    """

    @dataclass
    class Config:
        """old_every: steps between copies of the weights into pi_old; 1: pi_old is pi at the start of the
        step, and the ratio is 1. reference_every: steps between copies into pi_reference; 0: it keeps the
        initial weights.
        """

        old_every: int = 1
        reference_every: int = 0

        def __post_init__(self) -> None:
            if self.old_every < 1:
                raise ValueError("old_every must be at least 1")
            if self.reference_every < 0:
                raise ValueError("reference_every must be at least 0; 0 keeps the reference as it starts")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"sampling_scores_TE", "reference_scores_TE"}

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        why = "since the policy is the plain softmax of its scores over the candidates"
        return {"drawn": "as a policy's experts are", "plain_softmax": why, "sums_to_1": why}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"bias": "but the policy is the plain softmax of its scores"}

    @classmethod
    def must_be_required(cls, options: Config) -> dict[tuple[str, str], str]:
        return {("loss", "reference_scores_TE"): "which teaches the policy"}

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.old_weight: Tensor
        self.reference_weight: Tensor
        self.register_buffer("old_weight", self.weight.detach().clone())
        self.register_buffer("reference_weight", self.weight.detach().clone())

    def forward(self, hidden_TH: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """[T, H] fp32 -> [T, E] fp32; in training also two extras, both fp32 without gradient.

        `sampling_scores_TE`: the scores of pi_old, from which the selector draws. `reference_scores_TE`:
        those of pi_reference.
        """
        scores_TE = functional.linear(hidden_TH, self.weight.float())
        if not self.training:
            return scores_TE, {}
        with torch.no_grad():
            sampling_TE = functional.linear(hidden_TH, self.old_weight.float())
            reference_TE = functional.linear(hidden_TH, self.reference_weight.float())
        return scores_TE, {"sampling_scores_TE": sampling_TE, "reference_scores_TE": reference_TE}

    def after_step(self, load_E: Tensor, context: StepContext) -> None:
        """Update the copies whose interval has passed."""
        if context.step % self.config.old_every == 0:
            self.old_weight.copy_(self.weight)
        if self.config.reference_every and context.step % self.config.reference_every == 0:
            self.reference_weight.copy_(self.weight)
