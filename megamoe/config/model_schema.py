"""The section `model` of the configuration as typed dataclasses."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

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

Activation = Literal["swiglu", "geglu", "reglu", "gelu", "relu", "swiglu_clamped"]


@dataclass
class AttentionConfig(Section):
    """Variants of attention, each as some published model has it."""

    query_key_norm: Literal["none", "head", "whole"] = "none"  # before rotation: per head, or over all heads
    input_bias: bool | None = None  # of the projections to queries, keys, values; default: model.bias
    output_bias: bool | None = None  # of the output projection; default: model.bias
    window: PositiveInt | None = None  # a token sees itself and the window - 1 tokens before it
    window_blocks: list[Layers] | None = None  # the blocks with the window, counted from 1; default: all
    sinks: bool = False  # a learnt logit for each head in the softmax's denominator
    soft_cap: PositiveFloat | None = None  # c: logits become c * tanh(logits / c)
    scale: PositiveFloat | None = None  # of the logits; default: head_size^-0.5


@dataclass
class RotaryConfig(Section):
    """Which columns rotary positions turn, and the scaling of their frequencies for longer sequences.

    The keys from `factor` on belong to a scaling, and have the meaning of transformers' `rope_parameters`.
    """

    share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of a head's columns, from the first, that turn
    interleaved: bool = False  # pairs of columns 2i and 2i + 1, as in DeepSeek, instead of the two halves
    scaling: Literal["none", "linear", "yarn", "llama3"] = "none"  # for sequences longer than first trained
    factor: PositiveFloat | None = None  # linear, yarn, llama3: low frequencies are divided by it
    original_length: PositiveInt | None = None  # yarn, llama3: tokens of a sequence in the first training
    beta_fast: PositiveFloat | None = None  # yarn: turns above which a frequency is kept; default: 32
    beta_slow: PositiveFloat | None = None  # yarn: turns below which it is divided; default: 1
    mscale: NonNegativeFloat | None = None  # yarn: DeepSeek's factor of cosine and sine
    mscale_all_dim: NonNegativeFloat | None = None  # yarn: its divisor; model.latent scales the logits by it
    attention_factor: PositiveFloat | None = None  # yarn: factor of cosine and sine; default: from `factor`
    truncate: bool | None = None  # yarn: bounds at whole pairs of columns; default: true
    low_frequency_factor: PositiveFloat | None = None  # llama3: original_length / wave below which to divide
    high_frequency_factor: PositiveFloat | None = None  # llama3: original_length / wave above which to keep


@dataclass
class LatentConfig(Section):
    """Multi-head latent attention (DeepSeek-V2): sizes of a head, and ranks of the compressed states."""

    key_value_rank: Size  # of the compressed keys and values
    nope_size: Size  # columns of a query and key head without rotary positions
    rope_size: Size  # columns with rotary positions; all key heads share them
    value_size: Size  # columns of a value head
    query_rank: Size | None = None  # of the compressed queries; default: queries are not compressed


@dataclass
class MultiTokenConfig(Section):
    """Multi-token prediction (DeepSeek-V3): further blocks predict the tokens after the next one."""

    depth: Annotated[int, Field(ge=0, le=64)] = 0  # D: the number of further tokens, and of blocks; 0: none
    weight: PositiveFloat = 0.3  # of the mean of their losses


@dataclass
class ModelConfig(Section):
    """The transformer, of Megatron-Core's blocks."""

    architecture: Literal["decoder", "encoder", "encoder_decoder"] = "decoder"
    num_layers: Layers = 4  # transformer blocks; of an encoder_decoder, those of the decoder
    encoder_layers: Layers | None = None  # blocks of an encoder_decoder's encoder; default: num_layers
    hidden_size: Size = 256
    num_attention_heads: Size = 4
    num_query_groups: Size | None = None  # grouped-query attention; default: one per head
    head_size: Size | None = None  # of each attention head; default: hidden_size / num_attention_heads
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    ffn_hidden_size: Size | None = None  # the dense blocks' FFN size; default: 4 x hidden_size
    vocab_size: Annotated[int, Field(gt=0, le=10**8)] | None = None  # default: the tokenizer's
    vocab_multiple: Size = 64  # the embedding is padded to a multiple of it
    position: Literal["rope", "learned", "sinusoidal"] = "rope"
    rope_base: PositiveFloat = 10000.0  # base of the rotary frequencies
    rotary: RotaryConfig = field(default_factory=RotaryConfig)
    latent: LatentConfig | None = None  # multi-head latent attention; default: standard attention
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_position: Literal["pre", "post"] = "pre"  # before a sub-layer, or after its sum with the residual
    norm_eps: Small = 1e-5  # added to the variance
    activation: Activation = (
        "swiglu"  # the FFNs' activation; all that end in "glu", and swiglu_clamped, are gated
    )
    bias: bool = False  # in attention and dense FFNs; of experts: moe.expert_bias
    tie_embeddings: bool = True  # the output layer uses the embedding's weights
    scale_embeddings: bool = False  # multiply the words' embeddings by sqrt(hidden_size)
    embedding_scale: PositiveFloat | None = None  # multiply the words' embeddings by a constant instead
    residual_scale: PositiveFloat = 1.0  # multiplies what attention and FFN or MoE layer add to the residual
    logit_scale: PositiveFloat = 1.0  # multiplies the output layer's logits
    logit_soft_cap: PositiveFloat | None = None  # c: logits z, scaled, become c tanh(z / c)
    head_transform: bool = False  # an encoder's linear layer, activation and norm before the output layer
    num_labels: Size | None = None  # outputs of an encoder's head that predicts labels instead of tokens
    predicts: Literal["label", "number", "tags", "span"] = "label"  # what such a head predicts of a text
    pooling: Literal["mean", "first"] = "mean"  # of the hidden states, for labels
    pooler: bool = False  # a linear layer and tanh on the pooled state, for labels
    multi_token_prediction: MultiTokenConfig = field(default_factory=MultiTokenConfig)  # of a decoder
    init_std: Deviation = 0.02  # divided by sqrt(2 num_layers) for weights that write into the residual
    init_scale: Deviation | None = None  # s: truncated normal with std sqrt(s / fan_in) instead
    hidden_dropout: Fraction = 0.0  # on what a block adds to its residual
    attention_dropout: Fraction = 0.0  # on attention weights
    recompute: Literal["none", "selective", "full"] = "none"  # in backward: MoE layers, or whole blocks
    backend: Literal["auto", "torch", "transformer_engine"] = (
        "auto"  # auto: transformer_engine if installed, on CUDA
    )
    norm_kernel: Literal["auto", "torch", "apex"] = "auto"  # for `backend: torch`; auto: Apex if installed
    cpu_kernels: Literal["auto", "plain", "compiled"] = "auto"  # auto: compiled if GCC is found
    gpu_kernels: Literal["auto", "plain", "triton"] = "auto"  # auto: triton if installed
    keep_freed_memory: bool = (
        True  # on the CPU: malloc reuses freed memory and does not return it to the system
    )
    fp8: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = "none"  # scaling of FP8 products
    fp8_format: Literal["hybrid", "e4m3"] | None = None  # default: e4m3 for blockwise and mxfp8, else hybrid
    fp8_amax_history: Size | None = None  # for `delayed`: passes that set a scale; default: 1024
