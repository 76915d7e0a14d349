"""`dense_to_sparse`: noisy scores whose temperature falls, so that tokens begin with many experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.kernels.router import scores
from megamoe.moe import rng
from megamoe.moe.part import Dims, StepContext
from megamoe.moe.scorers.common import RowScorer
from megamoe.registry import register


@register("scorer", "dense_to_sparse")
class DenseToSparseScorer(RowScorer):
    """s = (W x + g) / tau, g from Gumbel(0, 1) for each token and expert in training; tau falls by step.

    With the score function `softmax` these are Gumbel-softmax gates. With the selector `above`, a token has
    almost all experts at first, and few when tau is small. tau goes from `start` to `end` within `steps`
    steps, by the same factor in each step, and then stays. It is a buffer, so that checkpoints save it and
    evaluation uses the last one, without noise.

    Source: Nie et al. 2021 (EvoMoE, arXiv 2112.14397), section 4.2, dense-to-sparse gate.

    Caveats: the paper leaves the schedule's shape open; ours is geometric.
    """

    takes_any_dtype = True

    @dataclass
    class Config:
        """start, end: the first and the last temperature. steps: within which tau goes from one to the
        other. noise: factor on g; 0: none.
        """

        start: float = 2.0
        end: float = 0.3
        steps: int = 1000
        noise: float = 1.0

        def __post_init__(self) -> None:
            if not self.start >= self.end > 0:
                raise ValueError("end must be positive and at most start: the temperature falls")
            if self.steps < 1:
                raise ValueError("steps must be at least 1")
            if not self.noise >= 0:
                raise ValueError("noise must be at least 0")

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.temperature: Tensor
        self.register_buffer("temperature", torch.full((), config.start, dtype=torch.float32))

    def metrics(self) -> dict[str, Tensor]:
        """Return the temperature and the mean L2 norm of the experts' rows of the weight."""
        return {"temperature": self.temperature.float(), **super().metrics()}

    def forward(self, hidden_TH: Tensor, context: StepContext) -> Tensor:
        """[T, H] in any float dtype -> [T, E] fp32."""
        scores_TE = scores(hidden_TH, self.weight, self.dims.kernels)
        if self.training and self.config.noise > 0:
            gumbel_TE = self.draws(context, "gumbel", scores_TE, scores_TE.shape[1], rng.gumbel)
            scores_TE = scores_TE + self.config.noise * gumbel_TE
        return scores_TE / self.temperature.float()

    def after_step(self, load_E: Tensor, context: StepContext) -> None:
        """Set the temperature of the next step."""
        share = min(context.step / self.config.steps, 1.0)
        self.temperature.fill_(self.config.start ** (1 - share) * self.config.end**share)
