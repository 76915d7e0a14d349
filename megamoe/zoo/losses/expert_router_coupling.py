"""`expert_router_coupling`: an expert responds most to the router's row of it, and its row to the expert."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe import rng
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.token_sharding import TokenSharding
from megamoe.registry import register


@register("loss", "expert_router_coupling")
class ExpertRouterCoupling(Part):
    """1/E^2 sum_(i != j) max(M_ij - a M_ii, 0) + max(M_ji - a M_ii, 0), M_ij = |W_j (r_i * d_i)|.

    r_i: row i of the router's weight, which stands for the tokens of expert i. W_j: the first weight of
    expert j (of its gate where it has one). d_i: in training, draws from U(1 - e_i, 1 + e_i) for each
    component, e_i = min_j |r_i - r_j| / (2 |r_i|), without gradient; 1 in evaluation. It teaches experts and
    router, and costs E^2 rows, whatever the number of tokens. E: the experts that compute.

    Source: Lv et al. 2025 (arXiv 2512.23447), eq. 3; a is 1 with 64 experts there, and 0.5 with 256.

    Caveats: compared with summaries of the paper and code after its figure 8, not with the paper itself: it
    takes the gate's product, as ours, and it is open whether its e_i carry gradient. In a latent space the
    rows are projected as tokens are.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss. alpha: a, the share of M_ii that the other entries may reach."""

        weight: float = 1.0
        alpha: float = 1.0

        def __post_init__(self) -> None:
            if not 0 < self.alpha <= 1:
                raise ValueError("alpha must be above 0 and at most 1")

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"rows_EH": "the rows of the router's weight"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        if moe.num_experts - moe.zero_experts.total < 2:
            raise ValueError("there is one expert that computes, and no other to compare; leave the loss out")
        if moe.expert_sublayers > 1:
            raise ValueError(
                f"an expert has {moe.expert_sublayers} first weights (moe.expert_sublayers); leave it out"
            )

    def attach(self, layer: Any) -> None:
        """Keep the layer, whose experts the loss calls."""
        self._layer = (layer,)
        self._expert_ranks = TokenSharding(layer.groups.expert)
        self._slice_ranks = TokenSharding(layer.groups.expert_tensor)

    def _norms(self, rows_EH: Tensor) -> Tensor:
        """Return M, fp32 [rows, E]; each rank computes its own experts' slices."""
        (layer,) = self._layer
        rows_EL = layer.to_latent(rows_EH)
        own = layer.num_experts // self._expert_ranks.size
        counts_E = torch.full((own,), len(rows_EL), device=rows_EL.device)
        gate_NF = layer.experts(rows_EL.repeat(own, 1), counts_E, only_gate=True)
        square_EP = gate_NF.float().square().sum(-1).view(own, len(rows_EL))
        square_EP = self._slice_ranks.all_gather(square_EP[None]).sum(0)
        square_EP = self._expert_ranks.all_gather(square_EP)
        return square_EP.clamp_min(torch.finfo(torch.float32).tiny).sqrt().T

    def _rows_EH(self, routing: Routing, context: StepContext) -> Tensor:
        """Return the drawn rows of the experts that compute, fp32 [E, H]."""
        rows_EH = routing.extras["rows_EH"][: self.dims.num_experts - self.dims.num_zero]
        if not self.training:
            return rows_EH
        key = context.draw_key(self.dims.layer, "expert_router_coupling")
        index_E = torch.arange(len(rows_EH), device=rows_EH.device)
        unit_EH = rng.uniform(key, index_E, rows_EH.shape[1], kernels=self.dims.kernels)
        return rows_EH * (1 + self._half_width_E(rows_EH.detach())[:, None] * (2 * unit_EH - 1))

    def _half_width_E(self, rows_EH: Tensor) -> Tensor:
        """Return e_i: draws then stay nearer to their own row than to any other."""
        distance_EE = (rows_EH[:, None] - rows_EH).square().sum(-1).sqrt()
        distance_EE.fill_diagonal_(torch.inf)
        smallest = torch.finfo(rows_EH.dtype).tiny
        return distance_EE.min(1).values / (2 * rows_EH.square().sum(1).sqrt()).clamp_min(smallest)

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        (layer,) = self._layer
        norm_EE = self._norms(self._rows_EH(routing, context).to(layer.experts.up.dtype))
        bound_E = self.config.alpha * norm_EE.diagonal()
        over_EE = (norm_EE - bound_E[:, None]).clamp_min(0) + (norm_EE - bound_E[None, :]).clamp_min(0)
        own_EE = torch.eye(len(norm_EE), dtype=torch.bool, device=norm_EE.device)
        loss = over_EE.masked_fill(own_EE, 0.0).sum() / len(norm_EE) ** 2
        return loss if routing.num_tokens else loss * 0
