"""`cosine`: tokens and experts compared by angle, on a low-dimensional hypersphere."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.moe.part import Constraint, Dims, Part, StepContext, mean_row_norm
from megamoe.moe.scorers.common import default_temperature
from megamoe.registry import register

EMBEDDING_NORM = 0.1  # Chi et al. 2022, section 3.1, "Implementation Tips"
SHORTEST = 1e-12  # a shorter vector has no direction in fp32


@register("scorer", "cosine")
class CosineScorer(Part):
    """s_i = cos(W x, e_i) / tau; W: [D, H], expert embeddings e: [E, D], tau a learned positive scalar.

    Both sides are L2-normalised. The embeddings are initialised with norm 0.1 and projected to it after each
    step, so only their direction is learned, at a constant rate. A zero vector W x scores 0 and gets no
    gradient.

    Source: Chi et al. 2022 (X-MoE) eq. 7 and 8, section 3.1 and appendix A; options `reduction` and
    `normalise`: table 3.

    reduction false: s_i = cos(x, e_i) / tau with e: [E, H], without W.
    normalise false: s_i = (W x) . e_i. The embeddings are initialised like other weights and have no fixed
    norm. There is no tau, which the paper introduces because cosines lie in [-1, 1]; `temperature` adds it.
    Both false: the scorer `linear`. With the score function `sigmoid` this is the last row of table 3, whose
    numbers are the baseline of table 1.

    The paper does not say how tau stays positive. Here tau = exp(log_temperature), which no step can bring to
    0. It is a vector of one element, so it gets no weight decay, which would pull tau to 1. tau belongs to
    the score, not the score function, so any score function and selector can follow. torchscale's gate
    differs: it does not normalise W x, keeps the embeddings' norm at 1.5, fixes D = 16 and has no
    temperature.
    With normalisation it returns the extra cosine_TE, the cosines, for the loss `cosine_balance`.
    """

    @dataclass
    class Config:
        """routing_dim: D; null: half the number of experts, at least 2. temperature: initial tau; null: 0.07
        with an elementwise score function (`sigmoid`), otherwise 0.3; without `normalise`, no tau.
        reduction: project tokens to D dimensions; false: score in the hidden size. normalise: divide
        tokens and embeddings by their L2 norm and keep the embeddings' norm at 0.1; false: plain dot
        products.
        """

        routing_dim: int | None = None
        temperature: float | None = None
        reduction: bool = True
        normalise: bool = True

        def __post_init__(self) -> None:
            if self.routing_dim is not None and self.normalise and self.routing_dim < 2:
                raise ValueError(
                    "routing_dim must be at least 2: on a line a cosine is 1 or -1 and learns nothing"
                )
            if self.routing_dim is not None and self.routing_dim < 1:
                raise ValueError("routing_dim must be at least 1")
            if self.routing_dim is not None and not self.reduction:
                raise ValueError(
                    "routing_dim is the size after the reduction, and reduction is false; "
                    "leave one of them out"
                )
            if self.temperature is not None and not self.temperature > 0:
                raise ValueError("temperature must be positive")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"cosine_TE"} if options.normalise else set()

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        size = dims.hidden_size
        if config.reduction:
            size = config.routing_dim or max(dims.num_experts // 2, 2)
            self.weight = nn.Parameter(torch.empty(size, dims.hidden_size))
            dims.init_weight(self.weight, "router")
        self.embedding = nn.Parameter(torch.empty(dims.num_experts, size))
        dims.init_weight(self.embedding, "router_embedding")
        if config.normalise:
            self.embedding.data.copy_(_at_norm(self.embedding.data))
        self.has_temperature = config.normalise or config.temperature is not None
        if self.has_temperature:
            temperature = config.temperature or default_temperature(dims.score_function)
            # Of shape [1]: DeepSpeed cannot broadcast a parameter without dimensions.
            self.log_temperature = nn.Parameter(torch.full((1,), math.log(temperature)))

    def forward(self, hidden_TH: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """[T, H] fp32 -> scores [T, E] fp32, and with normalisation the extra cosine_TE, fp32 in [-1, 1]."""
        token_TD, embedding_ED = self.project(hidden_TH), self.embedding.float()
        extras: dict[str, Tensor] = {}
        if self.config.normalise:
            scores_TE = functional.linear(_direction(token_TD), _direction(embedding_ED))
            extras["cosine_TE"] = scores_TE
        else:
            scores_TE = functional.linear(token_TD, embedding_ED)
        if self.has_temperature:
            scores_TE = scores_TE / self.log_temperature.float().exp()
        return scores_TE, extras

    def project(self, hidden_TH: Tensor) -> Tensor:
        """Return the tokens in the space of the embeddings, W x: [T, H] fp32 -> [T, D] fp32; x itself without
        reduction.
        """
        return functional.linear(hidden_TH, self.weight.float()) if self.config.reduction else hidden_TH

    def metrics(self) -> dict[str, Tensor]:
        """Return the temperature tau, and the mean L2 norm of the expert embeddings."""
        found = {"embedding_norm": mean_row_norm(self.embedding)}
        if self.has_temperature:
            found["temperature"] = self.log_temperature.float().exp().mean()
        return found

    def constraints(self) -> list[Constraint]:
        """Return the projection of the embeddings to their norm if scores are normalised."""
        return [(self.embedding, _at_norm)] if self.config.normalise else []


def _direction(vector_XD: Tensor) -> Tensor:
    """Return each row divided by its L2 norm; 0, without gradient, if the row is too short."""
    norm_X1 = torch.linalg.vector_norm(vector_XD, dim=-1, keepdim=True)
    return vector_XD / norm_X1.masked_fill(norm_X1 < SHORTEST, float("inf"))


def _at_norm(embedding_ED: Tensor) -> Tensor:
    return EMBEDDING_NORM * _direction(embedding_ED)
