"""`top_k`: every token goes to the k experts with the largest gate values."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.moe.part import Dims, Part
from megamoe.moe.routing import Pairs
from megamoe.registry import register


@register("selector", "top_k")
class TopK(Part):
    """The k largest of p, with one of four weights.

    raw: p itself (Switch, DeepSeek-V2). renormalised: p over the sum of the k chosen (GShard,
    DeepSeek-V3). kept_softmax: softmax over the k chosen scores (Shazeer et al. 2017 eq. 3-5,
    Softmax(KeepTopK)). one: 1. At k = 1 the two normalised kinds are always 1 and would give the
    router no gradient: they are refused there.
    """

    @dataclass
    class Config:
        """k: experts a token. weights: see the class. scale: a constant factor on the weights."""

        k: int = 2
        weights: Literal["raw", "renormalised", "kept_softmax", "one"] = "renormalised"
        scale: float = 1.0

        def __post_init__(self) -> None:
            if self.k < 1:
                raise ValueError("k must be at least 1")
            if self.k == 1 and self.weights in ("renormalised", "kept_softmax"):
                raise ValueError(
                    f"with k: 1 the weights {self.weights!r} are always 1 and the router would get no "
                    "gradient; set weights: raw"
                )

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        if config.k > dims.num_experts:
            raise UserError(
                f"moe.router.selector.k: found {config.k}, but there are only {dims.num_experts} experts "
                f"(moe.num_experts); choose k <= {dims.num_experts}"
            )

    @property
    def num_choices(self) -> int:
        """The k that capacity counts with."""
        return int(self.config.k)

    def forward(self, probs_TE: Tensor, scores_TE: Tensor, candidates_TE: Tensor | None) -> Pairs:
        """[T, E] fp32 -> T*k pairs; fewer where a token has fewer candidates."""
        ranking_TE = probs_TE.detach()
        if candidates_TE is not None:
            ranking_TE = ranking_TE.masked_fill(~candidates_TE, float("-inf"))
        expert_TK = ranking_TE.topk(self.config.k, dim=-1).indices
        weight_TK = self._weights(probs_TE, scores_TE, candidates_TE, expert_TK)
        num_tokens = probs_TE.shape[0]
        token_TK = torch.arange(num_tokens, device=probs_TE.device)[:, None].expand_as(expert_TK)
        choice_TK = torch.arange(self.config.k, device=probs_TE.device)[None, :].expand_as(expert_TK)
        pairs = Pairs(
            token_TK.reshape(-1), expert_TK.reshape(-1), weight_TK.reshape(-1), choice_TK.reshape(-1)
        )
        return pairs if candidates_TE is None else pairs.keep(candidates_TE.gather(1, expert_TK).reshape(-1))

    def _weights(
        self, probs_TE: Tensor, scores_TE: Tensor, candidates_TE: Tensor | None, expert_TK: Tensor
    ) -> Tensor:
        kind = self.config.weights
        if kind == "one":
            weight_TK = torch.ones_like(expert_TK, dtype=probs_TE.dtype)
        elif kind == "kept_softmax":
            if candidates_TE is not None:
                scores_TE = scores_TE.masked_fill(~candidates_TE, float("-inf"))
            weight_TK = scores_TE.gather(1, expert_TK).softmax(dim=-1)
        else:
            weight_TK = probs_TE.gather(1, expert_TK)
            if kind == "renormalised":
                total_T1 = weight_TK.sum(dim=-1, keepdim=True)
                weight_TK = weight_TK / total_T1.clamp_min(torch.finfo(total_T1.dtype).tiny)
        return weight_TK * self.config.scale
