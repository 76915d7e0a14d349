"""`policy`: routing as a stochastic policy, for the loss `grpo`. Experimental."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.moe.part import Dims, Part, StepContext
from megamoe.registry import register


@register("scorer", "policy")
class PolicyScorer(Part):
    """pi(e | u) = softmax(W u); in training the experts are drawn from pi_old, else the likeliest are taken.

    pi_old and pi_reference are the same map with the weights of an earlier step, kept in buffers [E, H]:
    pi_old draws (selector `sample`), so that the loss can tell how pi has moved since; pi_reference is
    what `grpo` holds pi close to. Both look at the hidden states of the model as it is now. A pair's weight
    is pi, so that the scorer learns from the language model's loss as well.

    Source: the slides' "RL-based expert routing" g = pi(e | u), with GRPO (Shao et al. 2024) as
    its objective. Caveats: the slides ascribe this to DeepSeek-R1, whose paper describes no such thing; it
    gives no architecture of the policy, for which a linear map is our reading. Experimental.
    """

    @dataclass
    class Config:
        """old_every: steps between copies of the weights into pi_old; 1: pi_old is pi as the step begins,
        and the ratio is 1. reference_every: steps between copies into pi_reference; 0: it stays the start."""

        old_every: int = 1
        reference_every: int = 0

        def __post_init__(self) -> None:
            if self.old_every < 1:
                raise ValueError("old_every must be at least 1")
            if self.reference_every < 0:
                raise ValueError("reference_every must be at least 0; 0 keeps the reference as it starts")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        """The extras of training."""
        return {"sampling_scores_TE", "reference_scores_TE"}

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        """Draws, and pi nothing but the softmax of the scores."""
        why = "since the policy is the plain softmax of its scores over the candidates"
        return {"drawn": "as a policy's experts are", "plain_softmax": why, "sums_to_1": why}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        """What a bias adds to pi."""
        return {"bias": "but the policy is the plain softmax of its scores"}

    @classmethod
    def must_be_required(cls, options: Config) -> dict[tuple[str, str], str]:
        """By a loss."""
        return {("loss", "reference_scores_TE"): "which teaches the policy"}

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.hidden_size))
        dims.start(self.weight, "router")
        self.old_weight: Tensor
        self.reference_weight: Tensor
        self.register_buffer("old_weight", self.weight.detach().clone())
        self.register_buffer("reference_weight", self.weight.detach().clone())

    def forward(self, hidden_TH: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """[T, H] fp32 -> [T, E] fp32; in training also `sampling_scores_TE` of pi_old, which the selector
        draws from, and `reference_scores_TE`, both fp32 without gradient."""
        scores_TE = functional.linear(hidden_TH, self.weight.float())
        if not self.training:
            return scores_TE, {}
        with torch.no_grad():
            sampling_TE = functional.linear(hidden_TH, self.old_weight.float())
            reference_TE = functional.linear(hidden_TH, self.reference_weight.float())
        return scores_TE, {"sampling_scores_TE": sampling_TE, "reference_scores_TE": reference_TE}

    def after_step(self, load_E: Tensor, context: StepContext) -> None:
        """Bring the copies up to date where their time has come."""
        if context.step % self.config.old_every == 0:
            self.old_weight.copy_(self.weight)
        if self.config.reference_every and context.step % self.config.reference_every == 0:
            self.reference_weight.copy_(self.weight)
