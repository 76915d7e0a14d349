"""How large a model will be, from its configuration alone: nothing is allocated."""

from dataclasses import dataclass

import torch

from megamoe.config.schema import ModelConfig, MoEConfig, RunConfig
from megamoe.moe.experts import up_width
from megamoe.moe.part import Dims
from megamoe.moe.router import Router, build_part


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters. total: of the whole model; active: those that one token meets with as many
    experts as its selector counts with (one, where it varies by token); expert: of all routed experts."""

    total: int
    active: int
    expert: int

    def on_rank(self, expert_parallel: int) -> int:
        """Parameters held by one rank when the routed experts are spread over `expert_parallel` ranks."""
        return self.total - self.expert + self.expert // expert_parallel


def moe_block_numbers(moe: MoEConfig, num_layers: int) -> list[int]:
    """The blocks with an MoE layer in the place of their FFN, counted from 1."""
    every = moe.layers.every
    regular = range(every, num_layers + 1, every) if every else range(0)
    return sorted(set(regular) | set(moe.layers.at))


def moe_layer_numbers(moe: MoEConfig, num_layers: int) -> list[int]:
    """All MoE layers: of those blocks, and the inserted ones by the block after which they stand."""
    return sorted({*moe_block_numbers(moe, num_layers), *moe.layers.insert_after})


def inserted_has_norm(moe: MoEConfig) -> bool:
    """Whether an inserted layer has a norm before it: not where its experts' sub-layers have their own."""
    return moe.expert_sublayers == 1


def num_choices(config: RunConfig) -> int:
    """Experts of a token, as its selector counts them: 1 where that varies."""
    with torch.device("meta"):
        selector = build_part(config.moe.router.selector, _dims(config, config.model.vocab_size))
    return int(selector.num_choices)


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-vocab_size // multiple) * multiple


def ffn_size(model: ModelConfig) -> int:
    """FFN size of the dense blocks."""
    return model.ffn_hidden_size or 4 * model.hidden_size


def expert_ffn_size(config: RunConfig) -> int:
    """FFN size of one expert."""
    return config.moe.expert_ffn_hidden_size or ffn_size(config.model)


def model_size(config: RunConfig, vocab_size: int) -> ModelSize:
    """Count the parameters of the model that `config` describes; `vocab_size` before padding."""
    model, moe = config.model, config.moe
    moe_blocks = len(moe_block_numbers(moe, model.num_layers))
    dense = _embedding(config, vocab_size) + model.num_layers * _attention(model) + _norm(model)
    dense += (model.num_layers - moe_blocks) * _ffn(config, ffn_size(model), bias=model.bias)
    layers = moe_blocks + len(set(moe.layers.insert_after))
    if layers == 0:
        return ModelSize(dense, dense, 0)
    parts, chosen = _parts(config, padded_vocab_size(vocab_size, model.vocab_multiple))
    dense += layers * (parts + _shared(config))
    if inserted_has_norm(moe):
        dense += (layers - moe_blocks) * _norm(model)
    expert = layers * _expert(config)
    return ModelSize(dense + moe.num_experts * expert, dense + chosen * expert, moe.num_experts * expert)


def _embedding(config: RunConfig, vocab_size: int) -> int:
    model = config.model
    words = padded_vocab_size(vocab_size, model.vocab_multiple) * model.hidden_size
    positions = config.data.sequence_length * model.hidden_size if model.position == "learned" else 0
    return words * (1 if model.tie_embeddings else 2) + positions


def _norm(model: ModelConfig) -> int:
    return model.hidden_size * (2 if model.norm == "layernorm" else 1)


def _attention(model: ModelConfig) -> int:
    """The attention of one block and the block's two norms."""
    hidden = model.hidden_size
    groups = model.num_query_groups or model.num_attention_heads
    qkv = hidden + 2 * groups * (hidden // model.num_attention_heads)
    biases = qkv + hidden if model.bias else 0
    return hidden * qkv + hidden * hidden + biases + 2 * _norm(model)


def _ffn(config: RunConfig, size: int, bias: bool) -> int:
    hidden = config.model.hidden_size
    up = up_width(size, config.model.activation)
    return hidden * up + size * hidden + (up + hidden if bias else 0)


def _expert(config: RunConfig) -> int:
    ffn = _ffn(config, expert_ffn_size(config), bias=False)
    sublayers = config.moe.expert_sublayers
    return ffn if sublayers == 1 else sublayers * (ffn + _norm(config.model))


def _shared(config: RunConfig) -> int:
    moe, hidden = config.moe, config.model.hidden_size
    if moe.num_shared_experts == 0:
        return 0
    mode = {"sum": 0, "gated": hidden, "residual": 2 * hidden + 2}[moe.shared_expert_mode]
    return _ffn(config, moe.num_shared_experts * expert_ffn_size(config), bias=False) + mode


def _parts(config: RunConfig, vocab_size: int) -> tuple[int, int]:
    """(parameters of a layer's router and losses, its selector's k), asked of parts that allocate nothing."""
    with torch.device("meta"):
        router = Router(config.moe.router, _dims(config, vocab_size))
        losses = [build_part(choice, router.dims) for choice in config.moe.losses.values()]
    count = sum(parameter.numel() for part in (router, *losses) for parameter in part.parameters())
    return count, router.dims.num_choices


def _dims(config: RunConfig, vocab_size: int | None) -> Dims:
    return Dims(config.model.hidden_size, config.moe.num_experts, vocab_size=vocab_size)
