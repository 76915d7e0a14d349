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


@dataclass
class BlockConfig(TransformerConfig):
    """Megatron-Core's configuration of blocks.

    own_rotary_base: the base if `SDPAttention` applies rotary positions itself; Megatron-Core's own code
    takes a dozen passes over queries and keys.
    """

    own_rotary_base: int | None = None


class SDPAttention(nn.Module):
    """Core attention, causal or with an explicit mask; replaces Megatron-Core's `DotProductAttention`.

    Grouped-query attention broadcasts the key and value heads. Rotary positions are applied here in one pass
    (`BlockConfig`).
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
        dropout = self.dropout if self.training else 0.0
        if attention_mask is None and not dropout:
            return causal_attention(query, key, value, self.rotary_base, self.scale)
        if self.rotary_base is not None:
            query, key = rotary(query, self.rotary_base), rotary(key, self.rotary_base)
        # Each tensor-parallel rank has different heads and draws their dropout separately.
        with get_cuda_rng_tracker().fork() if dropout else nullcontext():
            visible = None if attention_mask is None else ~attention_mask
            options = {"is_causal": visible is None, "dropout_p": dropout, "scale": self.scale}
            return attend(query, key, value, attn_mask=visible, **options)


class SplittingSelfAttention(SelfAttention):
    """Megatron-Core's self-attention, but backward does not copy the gradients of the heads together."""

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *arguments: Any, split_qkv: bool = True, **options: Any
    ) -> Any:
        """[S, B, H] -> queries [S, B, heads, D], keys and values [S, B, groups, D], as in Megatron-Core."""
        given = super().get_query_key_value_tensors
        if not split_qkv or self.config.num_query_groups != self.config.num_attention_heads:
            return given(hidden_states, *arguments, split_qkv=split_qkv, **options)
        query, key, value = split_heads(*given(hidden_states, *arguments, split_qkv=False, **options))
        return head_norm(self.q_layernorm, query), head_norm(self.k_layernorm, key), value
