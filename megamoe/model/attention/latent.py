"""Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1), of Megatron-Core's modules.

Keys and values are linear in a compressed state, which has a norm; so are queries where they are compressed.
The last columns of queries and keys rotate with the position, and all key heads share them.

Sizes: S positions, B sequences, N heads of this rank, D columns of queries and keys, R of them rotary, V
columns of values, C columns of a compressed state.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from megamoe.compat.megatron_compat import NormsAsSpecified, allow_latent_attention
from megamoe.config.model_schema import LatentConfig, ModelConfig
from megamoe.kernels.attention.core import apply_rotary_with_documents
from megamoe.kernels.attention.documents import Documents
from megamoe.kernels.attention.rotary import Rotary
from megamoe.model.attention.caches import KeyValueCache
from megamoe.model.attention.core import BlockConfig, SDPAttention
from megamoe.model.attention.rotary import rotary_of
from megamoe.model.linears import ColumnLinear
from megamoe.model.modules import Modules
from megamoe.moe.recompute import discard_output, recomputed

QKV = tuple[Tensor, Tensor, Tensor]
PLAIN_ROTARY = Rotary(10000.0)


@dataclass
class LatentBlockConfig(MLATransformerConfig, BlockConfig):
    """Megatron-Core's configuration of blocks with latent attention.

    latent_rotary: rotates the last columns of queries and keys. latent_norm_eps: of the norms of compressed
    states.
    """

    latent_rotary: Rotary = PLAIN_ROTARY
    latent_norm_eps: float | None = None


def latent_options(model: ModelConfig) -> dict[str, Any]:
    """Return keyword arguments for `LatentBlockConfig`; none for standard attention."""
    latent, rotary = model.latent, model.rotary
    if latent is None:
        return {}
    return {
        "latent_rotary": rotary_of(model),
        "latent_norm_eps": latent.norm_eps,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.nope_size,
        "qk_pos_emb_head_dim": latent.rope_size,
        "v_head_dim": latent.value_size,
        # By these two Megatron-Core scales the logits, as DeepSeek-V3 does.
        "rotary_scaling_factor": rotary.factor or 1.0,
        "mscale_all_dim": rotary.mscale_all_dim or 0.0,
        "rope_type": "rope",  # its own module of rotary positions is not used
    }


def latent_attention(attention: ModuleSpec, modules: Modules) -> ModuleSpec:
    """Return the specification of latent attention with the classes of standard attention's."""
    own, norm = attention.submodules, _norm_of_compressed(modules.norm)
    column = modules.linears[0]
    # Megatron-Core compares the class of these two with those that it knows.
    down = ColumnParallelLinear if column is ColumnLinear else column
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=column,
        linear_q_down_proj=down,
        linear_q_up_proj=column,
        linear_kv_down_proj=down,
        linear_kv_up_proj=column,
        core_attention=own.core_attention,
        linear_proj=own.linear_proj,
        q_layernorm=norm,
        kv_layernorm=norm,
    )
    return replace(attention, module=LatentAttention, submodules=submodules)


def _norm_of_compressed(norm: Callable[..., nn.Module]) -> type:
    """Return a norm class, from (config, hidden_size, eps), with the epsilon of compressed states."""

    class NormOfCompressed:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> Any:
            own = config.latent_norm_eps
            return norm(config=config, hidden_size=hidden_size, eps=eps if own is None else own)

    return NormOfCompressed


class LatentAttention(NormsAsSpecified, MLASelfAttention):
    """Megatron-Core's latent attention with a pass of its own.

    Megatron-Core's pass rotates by the positions in the sequence, not in the documents, and does not sum the
    gradients of the shared columns over tensor-parallel ranks without Transformer Engine.
    """

    config: LatentBlockConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        allow_latent_attention()
        super().__init__(*args, **kwargs)
        del self.rotary_pos_emb  # it has no parameters, and may be on another device
        if self.config.context is not None:
            self.core_attention.exchanges = False  # `qkv` does, before it rotates heads

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, hidden] -> ([S, B, hidden], bias); under sequence parallelism S is cut in both.

        attention_mask: the documents or the cache, as in `SDPAttention`. The cache holds whole keys and
        values, not the compressed state.
        """
        states = self._states(hidden_states)
        if {"latent_up", "core_attention"} <= self.config.recomputed and torch.is_grad_enabled():
            attended = recomputed(self._up_and_attended, [], *states, attention_mask)
        else:
            attended = self._up_and_attended(*states, attention_mask)
        return self.linear_proj(attended)

    def _up_and_attended(
        self, query_state: Tensor, state: Tensor, shared: Tensor, documents: Documents | KeyValueCache | None
    ) -> Tensor:
        qkv = self._qkv(query_state, state, shared, documents)
        return self._attended(*qkv, documents)

    def qkv(self, hidden: Tensor, documents: Documents | KeyValueCache | None) -> QKV:
        """Return queries and keys [S, B, N, D], rotated, and values [S, B, N, V].

        Under context parallelism these are all positions of this rank's heads.
        """
        return self._qkv(*self._states(hidden), documents)

    def _states(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the compressed states of queries, and of keys and values, and the shared columns [S, B, R].

        Queries that are not compressed have the hidden states.
        """
        config = self.config
        whole_SBC = self._whole(self.linear_kv_down_proj, hidden)
        state, shared = whole_SBC.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        state = self.kv_layernorm(self._own_positions(state))
        if config.q_lora_rank is None:
            return hidden, state, shared
        query_state = self._own_positions(self._whole(self.linear_q_down_proj, hidden))
        return self.q_layernorm(query_state), state, shared

    def _qkv(
        self, query_state: Tensor, state: Tensor, shared: Tensor, documents: Documents | KeyValueCache | None
    ) -> QKV:
        def up(query_state: Tensor, state: Tensor, shared: Tensor) -> QKV:
            return self._up(query_state, state, shared, documents)

        if "latent_up" not in self.config.recomputed:
            return up(query_state, state, shared)
        return discard_output(up, query_state, state, shared)

    def _up(
        self, query_state: Tensor, state: Tensor, shared: Tensor, documents: Documents | KeyValueCache | None
    ) -> QKV:
        config, heads = self.config, self.num_attention_heads_per_partition
        context = config.context
        nope, rope = config.qk_head_dim, config.qk_pos_emb_head_dim
        linear = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = linear(query_state)[0].unflatten(-1, (heads, nope + rope))
        both = self.linear_kv_up_proj(state)[0].unflatten(-1, (heads, nope + config.v_head_dim))
        if context is not None:
            query, both = context.to_heads(query), context.to_heads(both)
            heads //= context.size
        fixed, value = both.split([nope, config.v_head_dim], dim=-1)
        # Every rank's heads send a gradient to the shared columns: backward sums them.
        shared_SB1R = copy_to_tensor_model_parallel_region(shared)[:, :, None]
        if context is not None:
            shared_SB1R = context.gather(shared_SB1R)
        shared_SBNR = self._rotated(shared_SB1R, documents).expand(-1, -1, heads, -1)
        own, rotary_columns = query.split([nope, rope], dim=-1)
        query = torch.cat((own, self._rotated(rotary_columns, documents)), dim=-1)
        return query, torch.cat((fixed, shared_SBNR), dim=-1), value

    def _whole(self, linear: nn.Module, hidden: Tensor) -> Tensor:
        """Return all columns of a column-parallel layer's output, at all positions."""
        return gather_from_tensor_model_parallel_region(linear(hidden)[0])

    def _own_positions(self, state: Tensor) -> Tensor:
        """Return this rank's positions under sequence parallelism; the next layer gathers them."""
        if not self.config.sequence_parallel:
            return state
        return scatter_to_sequence_parallel_region(state)

    def _rotated(self, heads_SBNR: Tensor, documents: Documents | KeyValueCache | None) -> Tensor:
        rotary, kernels = self.config.latent_rotary, self.config.kernels
        if isinstance(documents, KeyValueCache):
            return documents.rotated(heads_SBNR, rotary, kernels)
        return apply_rotary_with_documents(heads_SBNR, rotary, documents, kernels)

    def _filled(self, heads: Tensor, columns: int) -> Tensor:
        """Return heads of so many columns, the last of them 0."""

        def fill(each: Tensor) -> Tensor:
            return functional.pad(each, (0, columns - each.shape[-1]))

        return discard_output(fill, heads) if "latent_up" in self.config.recomputed else fill(heads)

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, documents: Any) -> Tensor:
        """Return the core attention's output, [S, B, N * V].

        The kernels of ours and of PyTorch take heads of one size: the narrower ones are filled up with zeros.
        """
        width, columns = query.shape[-1], value.shape[-1]
        fills = isinstance(self.core_attention, SDPAttention) and not isinstance(documents, KeyValueCache)
        if fills and columns < width:
            value = self._filled(value, width)
        elif fills and columns > width:
            query, key = (self._filled(heads, columns) for heads in (query, key))
        mask_type = self.attn_mask_type
        output: Tensor = self.core_attention(query, key, value, documents, attn_mask_type=mask_type)
        if value.shape[-1] != columns:
            output = output.unflatten(-1, (-1, width))[..., :columns].flatten(-2)
        context = self.config.context
        if context is None:
            return output
        return context.to_positions(output.unflatten(-1, (-1, columns))).flatten(-2)


def latent_weights(model: ModelConfig, latent: LatentConfig) -> int:
    """Return the weights of one block's linear layers, each of which a token multiplies with once."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    query = heads * (latent.nope_size + latent.rope_size)
    rank = latent.query_rank
    queries = hidden * query if rank is None else rank * (hidden + query)
    down = hidden * (latent.key_value_rank + latent.rope_size)
    up = latent.key_value_rank * heads * (latent.nope_size + latent.value_size)
    return queries + down + up + heads * latent.value_size * hidden


def latent_norms(model: ModelConfig, latent: LatentConfig) -> int:
    """Return the parameters of one block's norms of the compressed queries, keys and values."""
    columns = latent.key_value_rank + (latent.query_rank or 0)
    return columns * (2 if model.norm == "layernorm" else 1)


def latent_scores(model: ModelConfig, latent: LatentConfig) -> int:
    """Return the products of one query with one key, and of its weight with the value, in all heads."""
    return model.num_attention_heads * (latent.nope_size + latent.rope_size + latent.value_size)
