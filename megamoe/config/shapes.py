"""Sizes and places that follow from the configuration by arithmetic alone."""

from megamoe.config.schema import Activation, ModelConfig, MoEConfig, RunConfig


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


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-vocab_size // multiple) * multiple


def ffn_size(model: ModelConfig) -> int:
    """FFN size of the dense blocks."""
    return model.ffn_hidden_size or 4 * model.hidden_size


def expert_ffn_size(config: RunConfig) -> int:
    """FFN size of one expert."""
    return config.moe.expert_ffn_hidden_size or ffn_size(config.model)


def expert_activation(config: RunConfig) -> Activation:
    """The activation of routed and shared experts."""
    return config.moe.expert_activation or config.model.activation
