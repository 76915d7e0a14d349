"""Plain torch.nn encoders and decoders with the weights of a dense model of ours."""

from typing import Any

import torch
from torch import Tensor, nn

from megamoe.config import RunConfig
from megamoe.model.architectures.encoder import Encoder
from megamoe.model.architectures.encoder_decoder import EncoderDecoder
from megamoe.model.moe_block import Block

Layer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


def plain_encoder(blocks: nn.ModuleList, config: RunConfig) -> list[nn.TransformerEncoderLayer]:
    found = []
    for block in blocks:
        assert isinstance(block, Block)
        layer = nn.TransformerEncoderLayer(**_sizes(config))
        _attention(layer.self_attn, block.self_attention.linear_qkv, block.self_attention.linear_proj, 3)
        _rest(layer, block, (layer.norm1, layer.norm2))
        _copy(layer.norm1, block.input_layernorm)
        found.append(layer.eval())
    return found


def plain_decoder(blocks: nn.ModuleList, config: RunConfig) -> list[nn.TransformerDecoderLayer]:
    found = []
    for block in blocks:
        assert isinstance(block, Block)
        layer = nn.TransformerDecoderLayer(**_sizes(config))
        _attention(layer.self_attn, block.self_attention.linear_qkv, block.self_attention.linear_proj, 3)
        cross = block.cross_attention
        _attention(layer.multihead_attn, cross.linear_kv, cross.linear_proj, 2)
        layer.multihead_attn.in_proj_weight.data[: len(cross.linear_q.weight)] = cross.linear_q.weight.data
        layer.multihead_attn.in_proj_bias.data[: len(cross.linear_q.bias)] = cross.linear_q.bias.data
        _copy(layer.norm1, block.input_layernorm)
        _copy(layer.norm2, block.pre_cross_attn_layernorm)
        _rest(layer, block, (layer.norm1, layer.norm3))
        found.append(layer.eval())
    return found


def embedded(model: Encoder | EncoderDecoder, tokens_BS: Tensor, positions_SH: Tensor) -> Tensor:
    words: Tensor = model.embedding.word_embeddings.weight
    return words[tokens_BS] + positions_SH[: tokens_BS.shape[1]]


def sinusoids(length: int, size: int) -> Tensor:
    """Written from Vaswani et al. 2017, place by place."""
    table_SH = torch.zeros(length, size, dtype=torch.float64)
    for position in range(length):
        for place in range(0, size, 2):
            angle = torch.tensor(position / 10000 ** (place / size), dtype=torch.float64)
            table_SH[position, place], table_SH[position, place + 1] = angle.sin(), angle.cos()
    return table_SH.float()


def _sizes(config: RunConfig) -> dict[str, Any]:
    model = config.model
    return {
        "d_model": model.hidden_size,
        "nhead": model.num_attention_heads,
        "dim_feedforward": model.ffn_hidden_size,
        "dropout": 0.0,
        "activation": "gelu",
        "batch_first": True,
        "norm_first": model.norm_position == "pre",
    }


def _attention(attention: nn.MultiheadAttention, inside: nn.Module, outside: nn.Module, sides: int) -> None:
    """Megatron-Core has queries, keys and values head by head, torch one after the other."""
    heads, size = attention.num_heads, attention.head_dim

    def apart(tensor: Tensor) -> Tensor:
        return tensor.data.unflatten(0, (heads, sides, size)).transpose(0, 1).flatten(0, 2)

    count = sides * heads * size
    attention.in_proj_weight.data[-count:] = apart(inside.weight)  # type: ignore[arg-type]
    attention.in_proj_bias.data[-count:] = apart(inside.bias)  # type: ignore[arg-type]
    _copy(attention.out_proj, outside)


def _rest(layer: Layer, block: Block, norms: tuple[nn.Module, nn.Module]) -> None:
    _copy(norms[1], block.pre_mlp_layernorm)
    _copy(layer.linear1, block.mlp.linear_fc1)
    _copy(layer.linear2, block.mlp.linear_fc2)


def _copy(into: nn.Module, of: nn.Module) -> None:
    into.weight.data, into.bias.data = of.weight.data, of.bias.data
