"""Experts that are stacks of residual FFN sub-layers, as in BASE and X-MoE."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.kernels.experts.ffn import add_expert_bias, expert_rows
from megamoe.kernels.experts.grouped_gemm import DelayedWeightGradients
from megamoe.moe.experts.dropout import ExpertDropout
from megamoe.moe.experts.grouped import GroupedExperts

NormKind = Literal["rmsnorm", "layernorm"]


class ExpertStack(nn.Module):
    """E_local experts S, each S(x) = x_n with x_i = x_(i-1) + FFN_i(norm_i(x_(i-1))), x_0 = x.

    `forward` returns S(x) - x. The layer multiplies it by the weight w, and the block adds x: x + w (S(x) -
    x), so the identity counts once.

    Source: Lewis et al. 2021 (BASE) and its authors' code, whose w is sigmoid(s); Chi et al. 2022 (X-MoE),
    section 4.1: "sparse layer with 3 FFN sub-layers".

    Caveats: BASE's norms are LayerNorms; here they are of the model's kind. BASE initialises the second
    weight of a sub-layer to 0; here it is initialised like any weight that writes into the residual.
    """

    def __init__(
        self,
        num_sublayers: int,
        hidden_size: int,
        ffn_size: int,
        expert_ids: range,
        *,
        norm: NormKind,
        norm_eps: float,
        **options: Any,
    ) -> None:
        """options: the keyword arguments of `GroupedExperts` other than `sublayer`."""
        super().__init__()
        self.norms = nn.ModuleList(
            ExpertNorm(norm, len(expert_ids), hidden_size, norm_eps) for _ in range(num_sublayers)
        )
        self.sublayers = nn.ModuleList(
            GroupedExperts(hidden_size, ffn_size, expert_ids, sublayer=number, **options)
            for number in range(1, num_sublayers + 1)
        )

    def put_off_gradients(self) -> list[DelayedWeightGradients | None]:
        """Return those of each sub-layer, see `GroupedExperts`."""
        return [sublayer.put_off_gradients() for sublayer in self.sublayers]  # type: ignore[operator]

    def forward(
        self,
        rows_NH: Tensor,
        counts_E: Tensor,
        dropout: ExpertDropout | None = None,
        delayed: list[DelayedWeightGradients | None] | None = None,
        host_E: Tensor | None = None,
    ) -> Tensor:
        """[N, H] rows grouped by expert and their counts, int64 [E_local] -> S(x) - x, [N, H].

        host_E: see `GroupedExperts`.
        """
        delayed = delayed or [None] * len(self.sublayers)
        experts_E = torch.arange(len(counts_E), device=counts_E.device)
        expert_N = torch.repeat_interleave(experts_E, counts_E, output_size=len(rows_NH))
        change_NH = torch.zeros_like(rows_NH)
        for norm, sublayer, sublayer_delayed in zip(self.norms, self.sublayers, delayed, strict=True):
            normed_NH = norm(rows_NH + change_NH, expert_N)
            change_NH = change_NH + sublayer(normed_NH, counts_E, dropout, sublayer_delayed, host_E=host_E)
        return change_NH


class ExpertNorm(nn.Module):
    """RMSNorm or LayerNorm with separate weights (and biases) for each expert, stacked [experts, H]."""

    def __init__(self, kind: NormKind, num_experts: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_experts, hidden_size)) if kind == "layernorm" else None

    def forward(self, rows_NH: Tensor, expert_N: Tensor) -> Tensor:
        """[N, H], and each row's local expert, int64 [N] -> [N, H]."""
        weight_NH = expert_rows(self.weight, expert_N)
        if self.bias is None:
            return functional.rms_norm(rows_NH, rows_NH.shape[1:], eps=self.eps) * weight_NH
        normed_NH = functional.layer_norm(rows_NH, rows_NH.shape[1:], eps=self.eps)
        return add_expert_bias(normed_NH * weight_NH, self.bias, expert_N)
