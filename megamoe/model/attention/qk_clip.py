"""QK-Clip: scale the weights of queries and keys so that no attention logit exceeds a limit.

Source: Kimi Team 2025 (Kimi K2, arXiv 2507.20534), section 2.1 and algorithm 1. A head whose largest logit S
exceeds the limit t has the factor c = t / S on its logits. Where the key is the head's own, queries and keys
get sqrt(c) each. Where heads share a key, as the rotary columns of latent attention do, the queries get c,
and the key stays as it is: other heads must not change. Keys of grouped queries are treated alike here.
"""

from typing import Any

import torch
from torch import Tensor, nn

from megamoe.moe.part import Constraint


def clipping(attention: Any, factor_N: Tensor) -> list[Constraint]:
    """Return the weights and biases of queries and keys of a self-attention, each with its scaling.

    attention: Megatron-Core's, or `LatentAttention`. factor_N: c of each of this rank's heads, at most 1.
    """
    if hasattr(attention, "linear_kv_up_proj"):
        return _of_latent(attention, factor_N)
    groups, size = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
    shares = len(factor_N) // groups
    own = shares == 1
    query_GP = (factor_N.sqrt() if own else factor_N).view(groups, shares)
    key_G1 = factor_N.sqrt().view(groups, 1) if own else torch.ones_like(query_GP[:, :1])
    # Rows: for each group the queries of its heads, its key, its value.
    rows = torch.cat([query_GP, key_G1, torch.ones_like(key_G1)], 1).repeat_interleave(size)
    return _scaled(attention.linear_qkv, rows)


def _of_latent(attention: Any, factor_N: Tensor) -> list[Constraint]:
    config, factor_N1 = attention.config, factor_N[:, None]
    fixed = factor_N1.sqrt().expand(-1, config.qk_head_dim)
    rotary = factor_N1.expand(-1, config.qk_pos_emb_head_dim)
    values = torch.ones_like(factor_N1).expand(-1, config.v_head_dim)
    queries = attention.linear_q_proj if config.q_lora_rank is None else attention.linear_q_up_proj
    return [
        *_scaled(queries, torch.cat([fixed, rotary], 1).flatten()),
        *_scaled(attention.linear_kv_up_proj, torch.cat([fixed, values], 1).flatten()),
    ]


def _scaled(linear: nn.Module, factor_R: Tensor) -> list[Constraint]:
    """Return the trained parameters of a linear layer, whose rows are multiplied by the factors."""

    def scale(value: Tensor) -> Tensor:
        shaped = factor_R.to(value.device, value.dtype).view(-1, *[1] * (value.dim() - 1))
        return value * shaped

    return [(parameter, scale) for parameter in linear.parameters() if parameter.requires_grad]
