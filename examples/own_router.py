"""A router of one's own: experts are points, and a token goes to the nearest ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.moe.part import Dims, Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import register


@register("scorer", "distance")
class DistanceScorer(Part):
    """s_i = -|x / |x| - c_i|^2 / temperature, with a learned point c_i for each expert."""

    @dataclass
    class Config:
        """temperature: divides the squared distances."""

        temperature: float = 1.0

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        generator = torch.Generator().manual_seed(dims.seed + dims.layer)
        points_EH = torch.randn(dims.num_experts, dims.hidden_size, generator=generator)
        self.points_EH = torch.nn.Parameter(torch.nn.functional.normalize(points_EH, dim=-1))

    def forward(self, hidden_TH: Tensor, context: StepContext) -> Tensor:
        """[T, H] -> [T, E]."""
        unit_TH = torch.nn.functional.normalize(hidden_TH, dim=-1)
        return -torch.cdist(unit_TH, self.points_EH.float()).square() / self.config.temperature


@register("loss", "entropy")
class EntropyLoss(Part):
    """Mean entropy of the gate: small when every token is sure of its experts."""

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 1e-3

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Scalar fp32; 0 if there are no tokens."""
        return torch.special.entr(routing.probs_TE).sum() / max(routing.num_tokens, 1)
