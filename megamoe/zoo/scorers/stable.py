"""`stable`: a scorer learns the routing, a light router learns to imitate it, and then replaces it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.moe import rng
from megamoe.moe.part import Dims, Part, StepContext, mean_row_norm
from megamoe.moe.scorers.common import known_ids_T, known_vocabulary
from megamoe.registry import register


@register("scorer", "stable")
class StableScorer(Part):
    """s = h . centroid, in two phases; with the score function `sigmoid`, a pair's weight is sigmoid(s).

    Phase 1, steps 1 to `phase_1_steps`: a token goes to the experts with the largest s. The loss
    `stable_distillation` teaches this choice to a light router, light = D(token id) . light centroid, with
    its own word embedding D [V, routing_dim]. Phase 2: the frozen light router chooses alone; the centroids
    still learn through the weights. Checkpoints save the phase, and evaluation follows it too.

    Freezing copies the light router into buffers: the optimiser's momentum and weight decay would still move
    a parameter whose gradient is 0. Phase 1 has its own balance loss, `stable_balance`.

    Source: Dai et al. 2022 (StableMoE), section 3.

    Caveats: with k > 1 (the paper has 1), the further experts of phase 2 are the light router's next ones,
    though it learned from first choices alone. In the public code the light router already chooses in
    evaluation during phase 1; here it does not. D is initialised with N(0, 1), as in the public code; the
    paper does not specify it.
    """

    @dataclass
    class Config:
        """phase_1_steps: the last step of phase 1; the paper's 6000 are a tenth of its run. routing_dim:
        width of the light router.
        """

        phase_1_steps: int = 6000
        routing_dim: int = 50

        def __post_init__(self) -> None:
            if self.phase_1_steps < 1:
                raise ValueError("phase_1_steps must be at least 1: the light router learns in phase 1")
            if self.routing_dim < 1:
                raise ValueError("routing_dim must be at least 1")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"light_TE", "ranking_TE", "phase_1"}

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"by_ranking": "which the frozen light router gives: p goes on learning"}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {
            "by_probs": "and p goes on learning, which would move the frozen choice",
            "bias": "which goes on learning and would move the frozen choice",
        }

    @classmethod
    def must_be_required(cls, options: Config) -> dict[tuple[str, str], str]:
        return {("loss", "light_TE"): "without which the light router learns nothing"}

    def __init__(self, config: Config, dims: Dims) -> None:
        """Raise UserError if the model has no token ids."""
        super().__init__(config, dims)
        vocab_size, width = known_vocabulary(dims, "stable"), config.routing_dim
        self.centroids = nn.Parameter(torch.empty(dims.num_experts, dims.hidden_size))
        self.light_embedding = nn.Parameter(torch.empty(vocab_size, width))
        self.light_centroids = nn.Parameter(torch.empty(dims.num_experts, width))
        dims.init_weight(self.centroids, "router")
        key = rng.key(dims.seed, 0, dims.layer, "light embedding")
        rng.init_weight(self.light_embedding, key, std=1.0, scale=None)
        dims.init_weight(self.light_centroids, "light router")
        self.frozen: Tensor
        self.frozen_embedding: Tensor
        self.frozen_centroids: Tensor
        self.register_buffer("frozen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("frozen_embedding", torch.zeros(vocab_size, width))
        self.register_buffer("frozen_centroids", torch.zeros(dims.num_experts, width))

    def metrics(self) -> dict[str, Tensor]:
        """Return the mean L2 norm of the expert centroids."""
        return {"embedding_norm": mean_row_norm(self.centroids)}

    def forward(self, hidden_TH: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """[T, H] fp32 -> s [T, E] fp32, and the extras.

        light_TE: fp32, the light router's scores while it learns. ranking_TE: fp32 without gradient, what the
        current phase chooses by. phase_1: fp32 scalar, 1 in phase 1 and 0 in phase 2.

        Raises:
            UserError: if the context has no token ids.
        """
        token_ids_T = known_ids_T(context, "stable", hidden_TH.device)
        scores_TE = functional.linear(hidden_TH, self.centroids.float())
        light_TE = _light_TE(token_ids_T, self.light_embedding, self.light_centroids)
        frozen_TE = _light_TE(token_ids_T, self.frozen_embedding, self.frozen_centroids)
        # The phase stays on the device: reading it would make the host wait.
        ranking_TE = torch.where(self.frozen, frozen_TE, scores_TE.detach())
        return scores_TE, {
            "light_TE": light_TE,
            "ranking_TE": ranking_TE,
            "phase_1": self.frozen.logical_not().to(torch.float32),
        }

    def after_step(self, load_E: Tensor, context: StepContext) -> None:
        """Freeze the light router after the last step of phase 1."""
        if context.step >= self.config.phase_1_steps and not bool(self.frozen):
            self.frozen_embedding.copy_(self.light_embedding)
            self.frozen_centroids.copy_(self.light_centroids)
            self.frozen.fill_(True)


def _light_TE(token_ids_T: Tensor, embedding_VD: Tensor, centroids_ED: Tensor) -> Tensor:
    routing_TD = functional.embedding(token_ids_T, embedding_VD.float())
    return functional.linear(routing_TD, centroids_ED.float())
