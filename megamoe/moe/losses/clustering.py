"""`clustering`: makes neighbouring experts have similar probabilities for a token."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.masks.expert_groups import by_group, check_clusters
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.validation import candidates_of, most_candidates
from megamoe.registry import get_part, register


@register("loss", "clustering")
class Clustering(Part):
    """E * C_intra * C_inter over clusters of L neighbouring experts, averaged over tokens.

    C_intra: the mean over the clusters of the (population) variance of p inside each. C_inter = exp(-mu (max
    - max2) / max), with the two largest cluster means of p; 1 if mu = 0, the default. `form: difference`: E *
    (C_intra - mu (max - max2) / max). Only candidates count: an expert that a mask removed is part of neither
    variance nor mean, and a cluster without candidates has mean 0 and does not count as a cluster.

    Source: Xie et al. 2022 (MoEC), eq. 6; the difference: equation 6 of its Vietnamese rendering.

    Scope: a mean over tokens, so it does not depend on how the global batch is cut into micro batches of
    equally many tokens.

    Caveats: the paper's beta is this loss's weight. E counts dropped experts too. The paper does not say
    clearly whether p belongs to one token or is a mean over tokens; ours belongs to one token.
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: factor in the total loss, beta. cluster_size: L. mu: strength of C_inter; values above 0
        help if few experts of a cluster are kept. form: see the class.
        """

        weight: float = 0.01
        cluster_size: int = 8
        mu: float = 0.0
        form: Literal["product", "difference"] = "product"

        def __post_init__(self) -> None:
            if self.cluster_size < 2:
                raise ValueError("cluster_size must be at least 2: one expert has no variance")
            if not self.mu >= 0:
                raise ValueError("mu must be at least 0")

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        check_clusters(options.cluster_size, moe, expert_parallel)
        if options.mu > 0 and options.cluster_size == moe.num_experts:
            raise ValueError(
                f"mu is {options.mu}, but cluster_size {options.cluster_size} makes one cluster, and "
                "mu compares two; set mu: 0 or a smaller cluster_size"
            )
        for choice in moe.router.masks:
            left, step_wide = candidates_of(choice, moe.num_experts), get_part("mask", choice.name).step_wide
            thinned = left.groups > 1 and left.each[1] < left.group_size
            if step_wide and thinned and left.group_size != options.cluster_size:
                raise ValueError(
                    f"cluster_size is {options.cluster_size}, but the mask {choice.name} has "
                    f"clusters of {left.group_size}; give both the same"
                )
            whole = moe.num_experts // options.cluster_size % left.groups == 0
            if most_candidates(moe) == 1 or (left.each[1] == 1 and whole):
                raise ValueError(
                    f"the mask {choice.name} leaves one expert of a cluster, which has no variance; "
                    "leave the loss out, or let more experts remain"
                )

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        num_clusters = routing.num_experts // self.config.cluster_size
        probs_TCL = by_group(routing.probs_TE, num_clusters)
        kept_TCL = torch.ones_like(probs_TCL, dtype=torch.bool)
        if routing.candidates_TE is not None:
            kept_TCL = by_group(routing.candidates_TE, num_clusters)
        kept_TC = kept_TCL.sum(dim=-1)
        mean_TC = probs_TCL.sum(dim=-1) / kept_TC.clamp_min(1)  # p is 0 for experts that are not kept
        square_TCL = (probs_TCL - mean_TC[..., None]).square().masked_fill(~kept_TCL, 0.0)
        variance_TC = square_TCL.sum(dim=-1) / kept_TC.clamp_min(1)
        loss_T = variance_TC.sum(dim=-1) / (kept_TC > 0).sum(dim=-1).clamp_min(1)
        if self.config.mu > 0:
            loss_T = self._with_inter(loss_T, mean_TC)
        return routing.num_experts * loss_T.sum() / max(routing.num_tokens, 1)

    def _with_inter(self, intra_T: Tensor, mean_TC: Tensor) -> Tensor:
        first_T, second_T = mean_TC.topk(2, dim=-1).values.unbind(-1)
        gap_T = (first_T - second_T) / first_T.clamp_min(torch.finfo(first_T.dtype).tiny)
        if self.config.form == "difference":
            return intra_T - self.config.mu * gap_T
        return intra_T * torch.exp(-self.config.mu * gap_T)
