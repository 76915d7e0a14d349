"""Norms of attention's queries and keys, per head or over all heads at once, under tensor parallelism."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn
from torch.nn import functional

from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.rms_norm import rms_norm


def norm_of_each_head(norm: Callable[..., nn.Module]) -> type:
    """Return the class of a norm over the columns of one head, with weights that all heads share.

    Source: Henry et al. 2020 (2010.04245); RMSNorm in this place is Qwen3's. A tensor-parallel rank has some
    of the heads, so its gradients of these weights are partial: the parameters carry Megatron-Core's mark for
    gradients that must be summed.

    norm: from (config, hidden_size, eps).
    """

    class NormOfEachHead:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
            built = norm(config=config, hidden_size=hidden_size, eps=eps)
            for parameter in built.parameters():
                parameter.sequence_parallel = config.tensor_model_parallel_size > 1  # type: ignore[attr-defined]
            return built

    return NormOfEachHead


class NormOfAllHeads(nn.Module):
    """RMSNorm or LayerNorm over the columns of all heads together, as in OLMoE (Muennighoff et al. 2024).

    [S, B, heads, D] to the same shape. Each column has a weight of its own, heads in order. A tensor-parallel
    rank has the weights of its heads, and the ranks add up what the mean square (and the mean) consist of.
    """

    def __init__(self, config: Any, heads: int, size: int, eps: float) -> None:
        super().__init__()
        ranks = config.tensor_model_parallel_size
        self.eps, self.is_cut, self.columns = eps, ranks > 1, heads * size
        self.kernels: Kernels = getattr(config, "kernels", DEFAULT_KERNELS)
        self.weight = nn.Parameter(torch.ones(heads // ranks * size))
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(heads // ranks * size))
        for parameter in self.parameters():
            set_tensor_model_parallel_attributes(parameter, self.is_cut, 0, 1)

    def forward(self, heads_SBND: Tensor) -> Tensor:
        """Return the norm of the heads, of which these are one rank's."""
        columns_SBH = heads_SBND.flatten(2)
        if self.is_cut:
            normed_SBH = self._normed_over_ranks(columns_SBH)
        elif self.bias is None:
            normed_SBH = rms_norm(columns_SBH, self.weight, self.eps, self.kernels)
        else:
            normed_SBH = functional.layer_norm(
                columns_SBH, self.weight.shape, self.weight, self.bias, self.eps
            )
        return normed_SBH.view_as(heads_SBND)

    def _normed_over_ranks(self, columns_SBH: Tensor) -> Tensor:
        exact_SBH = columns_SBH.float()
        if self.bias is not None:
            exact_SBH = exact_SBH - self._mean_over_ranks(exact_SBH)
        square_SB1 = self._mean_over_ranks(exact_SBH.square())
        normed_SBH = exact_SBH * torch.rsqrt(square_SB1 + self.eps) * self.weight.float()
        if self.bias is not None:
            normed_SBH = normed_SBH + self.bias.float()
        return normed_SBH.to(columns_SBH.dtype)

    def _mean_over_ranks(self, values_SBH: Tensor) -> Tensor:
        """Return the mean over all ranks' columns; its gradient is the sum of the ranks' gradients."""
        sum_SB1 = reduce_from_tensor_model_parallel_region(values_SBH.sum(-1, keepdim=True))
        total_SB1: Tensor = copy_to_tensor_model_parallel_region(sum_SB1)
        return total_SB1 / self.columns


class NormOfAllQueries(NormOfAllHeads):
    """`NormOfAllHeads` of the queries, with Megatron-Core's arguments."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(config, config.num_attention_heads, hidden_size, eps)


class NormOfAllKeys(NormOfAllHeads):
    """`NormOfAllHeads` of the keys, with Megatron-Core's arguments."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(config, config.num_query_groups, hidden_size, eps)
