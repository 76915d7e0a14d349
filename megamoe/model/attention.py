"""Causal attention in Megatron-Core's blocks: no s x s matrix in memory, with documents or without."""

from dataclasses import dataclass
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megamoe.compat.megatron_compat import head_norm
from megamoe.kernels.attention import attend, causal_attention, rotated, split_heads
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.documents import Documents
from megamoe.model.key_value_cache import KeyValueCache


@dataclass
class BlockConfig(TransformerConfig):
    """Megatron-Core's configuration of blocks.

    own_rotary_base: the base of the rotary positions that `SDPAttention` applies; None: Megatron-Core applies
    them, or there are none. kernels: the choice for our own norm and attention.
    """

    own_rotary_base: int | None = None
    kernels: Kernels = DEFAULT_KERNELS


class SDPAttention(nn.Module):
    """Core attention, causal in whole sequences or in their documents.

    It replaces Megatron-Core's `DotProductAttention` in a layer specification. Grouped-query attention
    broadcasts the key and value heads. It applies rotary positions if `BlockConfig.own_rotary_base` is set.
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
        documents: Documents | KeyValueCache | None,
        *unused: Any,
        **also_unused: Any,
    ) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d].

        documents: stands where Megatron-Core's blocks hand on their attention mask; None: each sequence is
        one document. A cache: the positions continue those that it holds (generation, without gradient).
        """
        if isinstance(documents, KeyValueCache):
            return documents.attend(self, query, key, value, self.rotary_base, self.scale, self.kernels)
        dropout = self.dropout if self.training else 0.0
        rotary_base, kernels = self.rotary_base, self.kernels
        if not dropout:
            return causal_attention(query, key, value, rotary_base, self.scale, documents, kernels=kernels)
        if rotary_base is not None:
            query, key = (rotated(side, rotary_base, documents, kernels) for side in (query, key))
        # Each tensor-parallel rank has other heads, whose dropout is their own.
        with get_cuda_rng_tracker().fork():
            return attend(query, key, value, documents, dropout_p=dropout, scale=self.scale)


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
