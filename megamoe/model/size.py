"""How large a model will be, from its configuration alone: nothing is allocated."""

from dataclasses import dataclass

from megamoe.config.schema import ModelConfig, MoEConfig, RunConfig
from megamoe.moe.experts import up_width


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters. total: of the whole model; active: those that one token meets under top-k
    (a router with a variable number of experts counts as one); expert: of all routed experts."""

    total: int
    active: int
    expert: int

    def on_rank(self, expert_parallel: int) -> int:
        """Parameters held by one rank when the routed experts are spread over `expert_parallel` ranks."""
        return self.total - self.expert + self.expert // expert_parallel


def moe_layer_numbers(moe: MoEConfig, num_layers: int) -> list[int]:
    """The MoE blocks, counted from 1."""
    every = moe.layers.every
    regular = range(every, num_layers + 1, every) if every else range(0)
    return sorted(set(regular) | set(moe.layers.at))


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
    moe_blocks = len(moe_layer_numbers(moe, model.num_layers))
    dense_blocks = model.num_layers - moe_blocks
    common = _embedding(config, vocab_size) + model.num_layers * _attention(model) + _norm(model)
    router = _router(config)
    shared = _ffn(config, moe.num_shared_experts * expert_ffn_size(config), bias=False)
    if moe.num_shared_experts and moe.shared_expert_gate:
        shared += model.hidden_size
    expert = _ffn(config, expert_ffn_size(config), bias=False)
    dense = (
        common
        + dense_blocks * _ffn(config, ffn_size(model), bias=model.bias)
        + moe_blocks * (router + shared)
    )
    experts = moe_blocks * moe.num_experts * expert
    chosen = int(getattr(moe.router.selector.options, "k", 1))
    return ModelSize(dense + experts, dense + moe_blocks * chosen * expert, experts)


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


def _router(config: RunConfig) -> int:
    """Parameters of the router's parts, counted on parts that allocate nothing."""
    import torch

    from megamoe.moe.part import Dims
    from megamoe.moe.router import Router

    with torch.device("meta"):
        router = Router(config.moe.router, Dims(config.model.hidden_size, config.moe.num_experts))
    return sum(parameter.numel() for parameter in router.parameters())
