"""The section `model` of the configuration as typed dataclasses."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from megamoe.config.parts import Section
from megamoe.config.values import (
    Deviation,
    Fraction,
    Layers,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Size,
    Small,
)

RecomputedModule = Literal[
    "norms",
    "core_attention",
    "latent_up",
    "experts_activation",
    "shared_experts",
    "moe",
    "moe_layer",
    "block",
]
# The tags make the message of an error one of the word or of the list, not of both.
Recompute = Annotated[
    Annotated[Literal["none", "selective", "full"], Tag("<word>")]
    | Annotated[list[RecomputedModule], Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<word>"),
]
Activation = Literal["swiglu", "geglu", "reglu", "gelu", "relu", "swiglu_clamped"]


@dataclass
class AttentionConfig(Section):
    """Variants of attention, each as some published model has it."""

    query_key_norm: Literal["none", "head", "whole"] = "none"
    """norms (`model.norm`) of queries and keys before the rotary positions: over the columns of each head, or
    over all heads at once; see docs/route/attention.md
    """
    input_bias: bool | None = None
    """biases of the projections to queries, keys and values; default: `model.bias`"""
    output_bias: bool | None = None
    """a bias of attention's output projection; default: `model.bias`"""
    window: PositiveInt | None = None
    """a token sees itself and the window - 1 tokens before it"""
    window_blocks: list[Layers] | None = None
    """the blocks with the window, counted from 1; default: all"""
    sinks: bool = False
    """a learnt logit for each head in the denominator of the softmax"""
    soft_cap: PositiveFloat | None = None
    """c: attention logits become c * tanh(logits / c)"""
    scale: PositiveFloat | None = None
    """factor of attention logits; default: head_size^-0.5"""


@dataclass
class RotaryConfig(Section):
    """Which columns rotary positions rotate, and the scaling of their frequencies for longer sequences.

    The keys from `factor` on belong to a scaling, and have the meaning of transformers' `rope_parameters`.
    """

    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of each head's columns, from the first, that rotary positions rotate (transformers'
    `partial_rotary_factor`); see docs/route/attention.md#rotary-positions
    """
    interleaved: bool = False
    """a pair is the columns 2i and 2i + 1, as in DeepSeek, instead of columns half a head apart"""
    scaling: Literal["none", "linear", "yarn", "llama3"] = "none"
    """changes the frequencies for sequences longer than in the first training; the keys below belong to a
    scaling
    """
    factor: PositiveFloat | None = None
    """linear, yarn, llama3: the divisor of low frequencies"""
    original_length: PositiveInt | None = None
    """yarn, llama3: tokens of a sequence in the first training (`original_max_position_embeddings`)"""
    beta_fast: PositiveFloat | None = None
    """yarn: turns in the original length above which a frequency is kept; default: 32"""
    beta_slow: PositiveFloat | None = None
    """yarn: turns below which it is divided by `factor`; default: 1"""
    mscale: NonNegativeFloat | None = None
    """yarn: DeepSeek's factor of cosine and sine"""
    mscale_all_dim: NonNegativeFloat | None = None
    """yarn: its divisor; with `model.latent` the logits are scaled by it too"""
    attention_factor: PositiveFloat | None = None
    """yarn: the factor of cosine and sine; default: 0.1 ln(factor) + 1, or from the two keys above"""
    truncate: bool | None = None
    """yarn: the bounds are whole pairs of columns; default: true"""
    low_frequency_factor: PositiveFloat | None = None
    """llama3: frequencies with fewer turns in the original length are divided by `factor`"""
    high_frequency_factor: PositiveFloat | None = None
    """llama3: frequencies with more turns are kept"""


@dataclass
class LatentConfig(Section):
    """Multi-head latent attention (DeepSeek-V2): sizes of a head, and ranks of the compressed states."""

    key_value_rank: Size
    """multi-head latent attention, if `model.latent` is given: size of the compressed keys and values; see
    docs/route/attention.md#multi-head-latent-attention
    """
    nope_size: Size
    """columns of a query and key head without rotary positions"""
    rope_size: Size
    """columns with rotary positions, an even number; all heads' keys share them"""
    value_size: Size
    """columns of a value head"""
    query_rank: Size | None = None
    """size of the compressed queries; default: queries are not compressed"""
    norm_eps: PositiveFloat | None = None
    """epsilon of the norms of compressed queries, keys and values; default: `model.norm_eps`"""


@dataclass
class MultiTokenConfig(Section):
    """Multi-token prediction (DeepSeek-V3): further blocks predict the tokens after the next one."""

    depth: Annotated[int, Field(ge=0, le=64)] = 0
    """D: further tokens that a decoder predicts, each by a further block (DeepSeek-V3, section 2.2)"""
    weight: PositiveFloat = 0.3
    """times the mean of their D losses is added to the loss"""


@dataclass
class MupConfig(Section):
    """muP: hyperparameters tuned on a small model, the base, hold for a wider one."""

    base: Size
    """hidden size of the base model, whose learning rate and init_std these are; FFN sizes, moe.latent_size
    and the heads together grow with the hidden size; see docs/run/optimizers.md#mup
    """
    base_head_size: Size | None = None
    """columns of a head of the base model; default: those of this model, so that the number of heads grows"""
    base_layers: Layers | None = None
    """blocks of the base model: what a block adds is multiplied by base_layers / num_layers (CompleteP);
    default: depth changes nothing
    """


@dataclass
class ModelConfig(Section):
    """The transformer, of Megatron-Core's blocks."""

    architecture: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    """causal attention; attention in both directions; or an encoder, and a decoder with cross attention to it
    """
    num_layers: Layers = 4
    """transformer blocks; of an encoder_decoder, those of the decoder"""
    encoder_layers: Layers | None = None
    """blocks of an encoder_decoder's encoder; default: num_layers"""
    hidden_size: Size = 256
    """a multiple of the number of heads, if `model.head_size` is not given"""
    num_attention_heads: Size = 4
    """attention heads"""
    num_query_groups: Size | None = None
    """for grouped-query attention; default: one for each head"""
    head_size: Size | None = None
    """columns of each attention head; default: hidden_size / num_attention_heads"""
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    ffn_hidden_size: Size | None = None
    """FFN size of the dense blocks; default: 4 x hidden_size"""
    vocab_size: Annotated[int, Field(gt=0, le=10**8)] | None = None
    """default: the tokenizer's"""
    vocab_multiple: Size = 64
    """the embedding is padded to a multiple of this"""
    position: Literal["rope", "learned", "sinusoidal"] = "rope"
    """rotary, learned or fixed sinusoidal positions; cross attention has no rotary ones"""
    rope_base: PositiveFloat = 10000.0
    """base of the rotary frequencies"""
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    latent: LatentConfig | None = None
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """type of the norms"""
    norm_position: Literal["pre", "post"] = "pre"
    """a norm before each sub-layer, and one at the end of a stack; or one after each sum of a sub-layer and
    its residual
    """
    norm_eps: Small = 1e-5
    """added to the variance"""
    activation: Activation = "swiglu"
    """activation of the FFNs; all but `gelu` and `relu` are gated. `swiglu_clamped` is that of gpt-oss: gate
    g at most 7, value v within [-7, 7], (v + 1) g sigmoid(1.702 g)
    """
    bias: bool = False
    """biases in attention and the dense FFN; those of the experts: `moe.expert_bias`"""
    tie_embeddings: bool = True
    """the output weights are the embedding, which encoder and decoder share"""
    scale_embeddings: bool = False
    """multiply the embeddings of tokens by sqrt(hidden_size), as beside sinusoidal positions"""
    embedding_scale: PositiveFloat | None = None
    """multiply the embeddings of tokens by this constant instead (Granite's `embedding_multiplier`)"""
    residual_scale: PositiveFloat = 1.0
    """multiplies what attention and the FFN or MoE layer add to the residual stream (Granite's
    `residual_multiplier`)
    """
    logit_scale: PositiveFloat = 1.0
    """multiplies the output layer's logits (1 / Granite's `logits_scaling`)"""
    logit_soft_cap: PositiveFloat | None = None
    """c: the logits z, after `logit_scale`, become c tanh(z / c) (Gemma 2's `final_logit_softcapping`)"""
    head_transform: bool = False
    """an encoder's linear layer, activation and norm before the output layer, as BERT has them"""
    num_labels: Size | None = None
    """an encoder predicts labels instead of tokens, with so many outputs: the number of labels, 1 for a
    number, 2 for a span; see docs/models/tune.md#labels
    """
    predicts: Literal["label", "number", "tags", "span"] = "label"
    """with `num_labels`: the label or the number of a whole text, the tag of each word, or a part of the text
    """
    pooling: Literal["mean", "first"] = "mean"
    """for labels: the mean of the hidden states of a text's tokens, or the first token's"""
    pooler: bool = False
    """for labels: a linear layer and tanh on the pooled state, as BERT has them"""
    multi_token_prediction: MultiTokenConfig = field(default_factory=MultiTokenConfig)
    init_std: Deviation = 0.02
    """standard deviation of the initial weights; see `init_depth_scaling`"""
    init_depth_scaling: Literal["outputs", "none"] = "outputs"
    """of the weights that write into the residual stream; outputs: init_std / sqrt(2 num_layers) as in GPT-2;
    none: init_std, as in DeepSeek's models and OLMoE. `init_scale` replaces both
    """
    init_scale: Deviation | None = None
    """s: draw the initial weights from a truncated normal with standard deviation sqrt(s / fan_in) instead"""
    mup: MupConfig | None = None
    hidden_dropout: Fraction = 0.0
    """on what a block adds to the residual stream"""
    attention_dropout: Fraction = 0.0
    """on the attention weights"""
    recompute: Recompute = "none"
    """what the backward pass computes again instead of keeping it; selective: the MoE layers, sending
    included; full: whole blocks; or a list: `norms` (their outputs), `core_attention` (without its
    projections), `latent_up` (queries, keys and values from latent attention's compressed states),
    `experts_activation` (its output), `shared_experts`, `moe` (the experts' products, without sending
    again), `moe_layer` (as selective), `block` (as full)
    """
    backend: Literal["auto", "torch", "transformer_engine"] = "auto"
    """auto: `torch`; with model.fp8 Transformer Engine, which nobody has measured to be faster in bf16"""
    norm_kernel: Literal["auto", "torch", "apex"] = "auto"
    """with `model.backend: torch`; auto: Apex if it is installed with its kernels and CUDA is available"""
    cpu_kernels: Literal["auto", "plain", "compiled"] = "auto"
    """auto: compiled if GCC is available"""
    gpu_kernels: Literal["auto", "plain", "triton"] = "auto"
    """on CUDA; auto: Triton if it can be used; see docs/scale/gpu.md#our-kernels"""
    keep_freed_memory: bool = True
    """on the CPU: malloc keeps freed memory for the process instead of returning it to the system"""
    fp8: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = "none"
    """FP8 matrix products, and how their scales are computed; see docs/scale/gpu.md#fp8"""
    fp8_format: Literal["hybrid", "e4m3"] | None = None
    """default: e4m3 for blockwise and mxfp8, otherwise hybrid"""
    fp8_amax_history: Size | None = None
    """for `delayed`: the number of passes that set a scale; default: 1024"""
