"""Sizes and positions that follow from the configuration by arithmetic."""

from dataclasses import dataclass
from math import lcm

from megamoe.config.schema import (
    Activation,
    ModelConfig,
    MoEConfig,
    MoELayerConfig,
    RunConfig,
    StackLayersConfig,
)

# Of a matrix's sizes and of an expert's rows: Transformer Engine's get_align_size_for_quantization.
FP8_MULTIPLE = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}


@dataclass(frozen=True)
class Stack:
    """A stack of blocks: the only one of a model, or one of an encoder_decoder's two.

    name: `decoder`, `encoder`, or `prediction` for the blocks of multi-token prediction, which are of the
    kind of the decoder's last block. first: the number of its first block in the model, whose blocks are
    counted from 1 through all stacks, an encoder's first. layers: the positions of its MoE layers, counted
    from 1.
    """

    name: str
    first: int
    num_layers: int
    layers: StackLayersConfig

    @property
    def moe_blocks(self) -> list[int]:
        """The blocks whose FFN is an MoE layer, counted from 1 in this stack."""
        every = self.layers.every
        regular = range(every, self.num_layers + 1, every) if every else range(0)
        return sorted(set(regular) | set(self.layers.at))

    @property
    def moe_layers(self) -> list[int]:
        """The blocks with an MoE layer, inside or inserted after them, counted from 1 in this stack."""
        return sorted({*self.moe_blocks, *self.layers.insert_after})


def stacks(config: RunConfig) -> list[Stack]:
    """Return the model's stacks of blocks, in the order of the numbers of their blocks."""
    model, layers = config.model, config.moe.layers
    if model.architecture != "encoder_decoder":
        stack = Stack(model.architecture, 1, model.num_layers, layers)
        depth = model.multi_token_prediction.depth
        return [stack] if depth == 0 else [stack, _prediction(stack, depth)]
    encoder_layers = model.encoder_layers or model.num_layers
    return [
        Stack("encoder", 1, encoder_layers, layers.encoder or StackLayersConfig()),
        Stack("decoder", 1 + encoder_layers, model.num_layers, layers.decoder or StackLayersConfig()),
    ]


def _prediction(stack: Stack, depth: int) -> Stack:
    """Return the blocks of multi-token prediction beside this stack."""
    last, all_of_them = stack.num_layers, list(range(1, depth + 1))
    at = all_of_them if last in stack.moe_blocks else []
    inserted = all_of_them if last in stack.layers.insert_after else []
    return Stack("prediction", last + 1, depth, StackLayersConfig(at=at, insert_after=inserted))


def num_blocks(config: RunConfig) -> int:
    """Return the number of blocks of all stacks."""
    return sum(stack.num_layers for stack in stacks(config))


def moe_block_numbers(config: RunConfig) -> list[int]:
    """Return the blocks whose FFN is an MoE layer, by their numbers in the model."""
    return [stack.first - 1 + block for stack in stacks(config) for block in stack.moe_blocks]


def inserted_after(config: RunConfig) -> list[int]:
    """Return the blocks after which an MoE layer is inserted, by their numbers in the model."""
    places = [(stack, block) for stack in stacks(config) for block in sorted({*stack.layers.insert_after})]
    return [stack.first - 1 + block for stack, block in places]


def moe_layer_numbers(config: RunConfig) -> list[int]:
    """Return the block numbers of all MoE layers; an inserted layer has that of the block before it."""
    return sorted({*moe_block_numbers(config), *inserted_after(config)})


def inserted_has_norm(moe: MoEConfig) -> bool:
    """Whether an inserted layer starts with a norm; it does not if its experts' sub-layers have norms."""
    return moe.expert_sublayers == 1


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Return the vocabulary size rounded up to the next multiple."""
    return -(-vocab_size // multiple) * multiple


def length_multiple(config: RunConfig) -> int:
    """Return what the lengths of filled sequences must be a multiple of.

    It divides them among the tensor-parallel ranks, and gives FP8 products the rows that they need in batches
    of any number of sequences.
    """
    parallel, rows = config.parallel, FP8_MULTIPLE.get(config.model.fp8, 1)
    return rows * parallel.tensor if parallel.sequence else lcm(rows, parallel.tensor)


def head_size(model: ModelConfig) -> int:
    """Return the number of columns of each attention head."""
    return model.head_size or model.hidden_size // model.num_attention_heads


def query_size(model: ModelConfig) -> int:
    """Return the number of columns of all queries of a token together."""
    return model.num_attention_heads * head_size(model)


def key_size(model: ModelConfig) -> int:
    """Return the number of columns of all keys of a token together, which is that of its values."""
    return (model.num_query_groups or model.num_attention_heads) * head_size(model)


def has_input_bias(model: ModelConfig) -> bool:
    """Whether the projections to queries, keys and values have biases."""
    return model.bias if model.attention.input_bias is None else model.attention.input_bias


def has_output_bias(model: ModelConfig) -> bool:
    """Whether attention's output projection has a bias."""
    return model.bias if model.attention.output_bias is None else model.attention.output_bias


def recomputed_modules(model: ModelConfig) -> frozenset[str]:
    """Return the modules that the backward pass computes again (`model.recompute`)."""
    if isinstance(model.recompute, str):
        return frozenset({"none": (), "selective": ("moe_layer",), "full": ("block",)}[model.recompute])
    return frozenset(model.recompute)


def window_of(model: ModelConfig, block: int) -> int | None:
    """Return the window of attention in a decoder's block, counted from 1; None: all earlier tokens."""
    attention = model.attention
    if attention.window_blocks is not None and block not in attention.window_blocks:
        return None
    return attention.window


def ffn_size(model: ModelConfig) -> int:
    """Return the FFN size of the dense blocks."""
    return model.ffn_hidden_size or 4 * model.hidden_size


def expert_ffn_size(config: RunConfig) -> int:
    """Return the FFN size of one expert."""
    return config.moe.expert_ffn_hidden_size or ffn_size(config.model)


def routed_experts(moe: MoELayerConfig) -> int:
    """Return the number of experts that a router chooses among, those without computation too."""
    return moe.num_experts + moe.zero_experts.total


def expert_hidden_size(config: RunConfig) -> int:
    """Return the size of the rows that routed experts compute and that are sent to them."""
    return config.moe.latent_size or config.model.hidden_size


def shared_ffn_size(moe: MoEConfig, expert_size: int) -> int:
    """Return the joint FFN size of a layer's shared experts; expert_size: of one routed expert."""
    if moe.num_shared_experts == 0:
        return 0
    return moe.shared_expert_ffn_hidden_size or moe.num_shared_experts * expert_size


def expert_activation(config: RunConfig) -> Activation:
    """Return the activation of routed and shared experts."""
    return config.moe.expert_activation or config.model.activation
