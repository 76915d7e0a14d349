"""Sizes and positions that follow from the configuration by arithmetic."""

from megamoe.config.schema import Activation, ModelConfig, MoEConfig, RunConfig


def moe_block_numbers(moe: MoEConfig, num_layers: int) -> list[int]:
    """Return the blocks whose FFN is an MoE layer, counted from 1."""
    every = moe.layers.every
    regular = range(every, num_layers + 1, every) if every else range(0)
    return sorted(set(regular) | set(moe.layers.at))


def moe_layer_numbers(moe: MoEConfig, num_layers: int) -> list[int]:
    """Return the block numbers of all MoE layers; an inserted layer has the number of the block before
    it.
    """
    return sorted({*moe_block_numbers(moe, num_layers), *moe.layers.insert_after})


def inserted_has_norm(moe: MoEConfig) -> bool:
    """Whether an inserted layer starts with a norm; it does not if its experts' sub-layers have norms."""
    return moe.expert_sublayers == 1


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Return the vocabulary size rounded up to the next multiple."""
    return -(-vocab_size // multiple) * multiple


def ffn_size(model: ModelConfig) -> int:
    """Return the FFN size of the dense blocks."""
    return model.ffn_hidden_size or 4 * model.hidden_size


def expert_ffn_size(config: RunConfig) -> int:
    """Return the FFN size of one expert."""
    return config.moe.expert_ffn_hidden_size or ffn_size(config.model)


def expert_activation(config: RunConfig) -> Activation:
    """Return the activation of routed and shared experts."""
    return config.moe.expert_activation or config.model.activation
