"""The core attention of Megatron-Core's blocks: no s x s matrix in memory, with documents or without."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megamoe.compat.megatron_compat import head_norm
from megamoe.kernels.attention.core import (
    attend,
    bidirectional_attention,
    causal_attention,
    cross_attention,
    split_heads,
    turned,
)
from megamoe.kernels.attention.documents import Documents, SourceLengths
from megamoe.kernels.attention.rotary import Rotary
from megamoe.kernels.attention.variants import Variant
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.model.attention.caches import KeyValueCache
from megamoe.model.attention.context_parallel import ContextShard
from megamoe.moe.recompute import recomputed


@dataclass
class BlockConfig(TransformerConfig):
    """Megatron-Core's configuration of blocks.

    own_rotary: the rotary positions that `SDPAttention` applies; None: Megatron-Core applies them, or there
    are none. rotary_factor: of cosine and sine, where Megatron-Core applies them. kernels: the choice for our
    own norm and attention. attention_output_bias: whether attention's output projection has a bias, for which
    Megatron-Core has no key of its own. windows, sinks, soft_cap: what `SDPAttention` computes in
    self-attention, see `Variant`; windows by block, empty for none. context: of context parallelism.
    recomputed: what the backward pass computes again, see `model.recompute`.
    """

    own_rotary: Rotary | None = None
    rotary_factor: float = 1.0
    kernels: Kernels = DEFAULT_KERNELS
    attention_output_bias: bool = False
    windows: tuple[int | None, ...] = ()
    sinks: bool = False
    soft_cap: float | None = None
    context: ContextShard | None = None
    recomputed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary_factor != 1.0:
            # Megatron-Core's factor, if these exist: 0.1 * mscale * ln(scaling factor) + 1. 0.16 reads it
            # in each pass, 0.19 when attention is built.
            mscale = 10.0 * (self.rotary_factor - 1.0)
            names = ("yarn_rotary_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim")
            self.__dict__.update(zip(names, (math.e, mscale, 0.0), strict=True))


class SDPAttention(nn.Module):
    """Core attention: causal or bidirectional, in whole sequences or in their documents, or cross attention.

    softmax_offset: with sinks, the logit of each of this rank's heads, named as in Megatron-Core. It starts
    at 0.

    It replaces Megatron-Core's `DotProductAttention` in a layer specification, whose mask type says whether
    it is causal. Grouped-query attention broadcasts the key and value heads. It applies rotary positions if
    `BlockConfig.own_rotary` is set, except in cross attention.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        *unused: Any,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **also_unused: Any,
    ) -> None:
        super().__init__()
        self.is_causal = attn_mask_type == AttnMaskType.causal
        self.is_cross = attention_type == "cross"
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.scale = softmax_scale or getattr(config, "softmax_scale", None) or None
        self.rotary: Rotary | None = getattr(config, "own_rotary", None)
        self.kernels: Kernels = getattr(config, "kernels", DEFAULT_KERNELS)
        windows = getattr(config, "windows", ())
        self.window: int | None = windows[layer_number - 1] if windows else None
        self.soft_cap: float | None = getattr(config, "soft_cap", None)
        self.softmax_offset: nn.Parameter | None = None
        if getattr(config, "sinks", False):
            ranks = config.tensor_model_parallel_size
            self.softmax_offset = nn.Parameter(torch.zeros(config.num_attention_heads // ranks))
            set_tensor_model_parallel_attributes(self.softmax_offset, ranks > 1, 0, 1)
        self.context: ContextShard | None = getattr(config, "context", None)
        self.exchanges = self.context is not None  # not where the caller does, as latent attention
        self.recomputes = "core_attention" in getattr(config, "recomputed", ())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | SourceLengths | KeyValueCache | None,
        *unused: Any,
        **also_unused: Any,
    ) -> Tensor:
        """query [s, b, heads, d], key and value [s or l, b, groups, d] -> [s, b, heads * d].

        documents: passed through Megatron-Core's `attention_mask` argument; None: each sequence is
        one document. In cross attention, where the other sequences end. A cache: the positions continue those
        that it holds (generation, without gradient).
        """
        if isinstance(documents, KeyValueCache):
            options = (self.rotary, self.scale, self._variant(), self.kernels)
            return documents.attend(self, query, key, value, *options)
        if self.context is not None and self.exchanges:
            num_heads = query.shape[2]
            query = self.context.to_heads(query)
            key, value = (self.context.groups_to_heads(heads, num_heads) for heads in (key, value))
            attended = self._attended(query, key, value, documents)
            return self.context.to_positions(attended.unflatten(-1, (query.shape[2], -1))).flatten(-2)
        return self._attended(query, key, value, documents)

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | SourceLengths | None
    ) -> Tensor:
        if self.recomputes:
            return recomputed(self._compute, [], query, key, value, documents)
        return self._compute(query, key, value, documents)

    def _compute(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | SourceLengths | None
    ) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        # Each tensor-parallel rank has other heads, whose dropout is their own.
        with get_cuda_rng_tracker().fork() if dropout else nullcontext():
            if isinstance(documents, SourceLengths) or self.is_cross:
                assert not isinstance(documents, Documents)
                return cross_attention(query, key, value, documents, self.scale, dropout)
            return self._within(query, key, value, documents, dropout)

    def _within(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None, dropout: float
    ) -> Tensor:
        qkv, rotary, kernels = (query, key, value), self.rotary, self.kernels
        if not self.is_causal:
            return bidirectional_attention(*qkv, rotary, self.scale, documents, dropout, kernels=kernels)
        if not dropout:
            variant = self._variant()
            return causal_attention(*qkv, rotary, self.scale, documents, variant, kernels=kernels)
        query, key = turned(query, key, rotary, documents, kernels)
        return attend(query, key, value, documents, dropout_p=dropout, scale=self.scale)

    def _variant(self) -> Variant:
        sinks: Tensor | None = self.softmax_offset
        if sinks is not None and self.context is not None:
            sinks = self.context.own_heads(sinks)
        return Variant(self.window, self.soft_cap, sinks)


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
