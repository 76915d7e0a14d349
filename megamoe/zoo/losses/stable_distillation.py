"""`stable_distillation`: teaches StableMoE's light router the scorer's choices."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import register


@register("loss", "stable_distillation")
class StableDistillation(Part):
    """Mean over tokens of -log softmax(light_t)[a_t], where a_t is the token's first choice in phase 1.

    a_t carries no gradient: only the light router of the scorer `stable` learns from this loss, which is 0 in
    phase 2.

    Source: Dai et al. 2022 (StableMoE), section 3.1.

    Caveats: the paper's loss and its task loss are sums over tokens; ours are means. The paper adds it with
    factor 1, the public code with factor 0.3.

    Scope: a mean over tokens, so it does not depend on how the global batch is cut into micro batches of
    equal size.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 1.0

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"light_TE": "the scores of a light router to be taught", "phase_1": "which ends the lesson"}

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        target_T = routing.ranking_TE.argmax(dim=-1)
        total = functional.cross_entropy(routing.extras["light_TE"], target_T, reduction="sum")
        return total / max(routing.num_tokens, 1) * routing.extras["phase_1"]
