"""Attention through PyTorch's scaled_dot_product_attention: no s x s matrix in memory."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from megamoe.kernels.block import rotary


@dataclass
class BlockConfig(TransformerConfig):
    """Megatron-Core's configuration of blocks.

    own_rotary_base: where `SDPAttention` turns queries and keys itself; Megatron-Core's way takes a dozen
    passes over them.
    """

    own_rotary_base: int | None = None


class SDPAttention(nn.Module):
    """Megatron-Core's core attention, causal or under an explicit mask.

    Takes the place of `DotProductAttention` in a layer spec; grouped-query attention by broadcasting
    the key and value heads. Rotary positions are applied here, in one pass (`BlockConfig`).
    """

    def __init__(
        self, config: Any, *unused: Any, attention_dropout: float | None = None, **also_unused: Any
    ) -> None:
        super().__init__()
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = config.softmax_scale if getattr(config, "softmax_scale", None) else None
        self.rotary_base: int | None = getattr(config, "own_rotary_base", None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *unused: Any,
        **also_unused: Any,
    ) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d].

        attention_mask: bool, True where attention is masked out (Megatron's convention), or None: causal.
        """
        if self.rotary_base is not None:
            query, key = rotary(query, self.rotary_base), rotary(key, self.rotary_base)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        dropout = self.dropout if self.training else 0.0
        # Each tensor-parallel rank has other heads, whose dropout is their own.
        with get_cuda_rng_tracker().fork() if dropout else nullcontext():
            context = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=None if attention_mask is None else ~attention_mask,
                is_causal=attention_mask is None,
                dropout_p=dropout,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
        context = context.permute(2, 0, 1, 3)
        return context.reshape(*context.shape[:2], -1)
