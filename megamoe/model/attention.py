"""Attention through PyTorch's scaled_dot_product_attention: no s x s matrix in memory."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megamoe.compat.megatron_compat import head_norm
from megamoe.kernels.attention import attend, causal_attention, split_heads
from megamoe.kernels.block import rotary
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels


@dataclass
class BlockConfig(TransformerConfig):
    """Megatron-Core's configuration of blocks.

    own_rotary_base: the base of the rotary positions that `SDPAttention` applies; None: Megatron-Core applies
    them, or there are none. kernels: the choice for our own norm and attention.
    """

    own_rotary_base: int | None = None
    kernels: Kernels = DEFAULT_KERNELS


class SDPAttention(nn.Module):
    """Megatron-Core's core attention, causal or under an explicit mask.

    Takes the place of `DotProductAttention` in a layer spec; grouped-query attention by broadcasting
    the key and value heads. On the CPU it applies the rotary positions (`BlockConfig.own_rotary_base`).
    """

    def __init__(
        self, config: Any, *unused: Any, attention_dropout: float | None = None, **also_unused: Any
    ) -> None:
        super().__init__()
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = config.softmax_scale if getattr(config, "softmax_scale", None) else None
        self.rotary_base: int | None = getattr(config, "own_rotary_base", None)
        self.kernels: Kernels = getattr(config, "kernels", DEFAULT_KERNELS)

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
        dropout = self.dropout if self.training else 0.0
        if attention_mask is None and not dropout:
            return causal_attention(query, key, value, self.rotary_base, self.scale, kernels=self.kernels)
        if self.rotary_base is not None:
            query, key = (rotary(side, self.rotary_base, self.kernels) for side in (query, key))
        # Each tensor-parallel rank has other heads, whose dropout is their own.
        with get_cuda_rng_tracker().fork() if dropout else nullcontext():
            visible = None if attention_mask is None else ~attention_mask
            options = {"is_causal": visible is None, "dropout_p": dropout, "scale": self.scale}
            return attend(query, key, value, attn_mask=visible, **options)


class SplittingSelfAttention(SelfAttention):
    """Megatron-Core's self-attention; its backward pass does not copy the gradients of the heads together."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *arguments: Any, split_qkv: bool = True, **options: Any
    ) -> Any:
        """As Megatron-Core's: [S, B, H] -> queries [S, B, heads, D], keys and values [S, B, groups, D]."""
        given = super().get_query_key_value_tensors
        if not split_qkv or self.config.num_query_groups != self.config.num_attention_heads:
            return given(hidden_states, *arguments, split_qkv=split_qkv, **options)
        query, key, value = split_heads(*given(hidden_states, *arguments, split_qkv=False, **options))
        return head_norm(self.q_layernorm, query), head_norm(self.k_layernorm, key), value
