"""Constant factors of a model: on its embeddings, on what blocks add to the residual stream, on the logits.

They are hooks on Megatron-Core's modules, so that every path through these has them: training, evaluation,
generation, recomputation, the sums inside the norms' kernels (`Block`), and every loss on the logits.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.config.mup import logit_scale
from megamoe.config.schema import ModelConfig


def scale_embeddings(embedding: nn.Module, model: ModelConfig) -> None:
    """Multiply the embeddings of tokens by sqrt(H) (Vaswani et al. 2017, section 3.4) or a constant
    (Granite).

    embedding: of tokens alone, without positions.
    """
    scale = math.sqrt(model.hidden_size) if model.scale_embeddings else model.embedding_scale
    if scale is not None:
        embedding.register_forward_hook(lambda module, inputs, output: output * scale)


def scale_residual(branch: nn.Module, scale: float) -> None:
    """Multiply what a sub-layer adds to the residual stream: its output and the bias beside it.

    branch: returns (output, bias or None), as Megatron-Core's attention and MLP do. Source: Granite's
    residual_multiplier.
    """
    if scale == 1:
        return

    def scaled(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor | None]) -> Any:
        value, bias = output
        return value * scale, None if bias is None else bias * scale

    branch.register_forward_hook(scaled)


def change_logits(output_layer: nn.Module, model: ModelConfig) -> None:
    """Make an output layer return cap tanh(scale z / cap) instead of its logits z, or scale z without a cap.

    output_layer: takes hidden states first, and returns (logits, bias or None). Under tensor parallelism each
    rank changes its part of the vocabulary. The scale is put on the hidden states, which are far fewer.
    Sources: Granite's logits_scaling, which is 1 / scale; Gemma 2's final_logit_softcapping.
    """
    scale, cap = logit_scale(model), model.logit_soft_cap
    if scale != 1:

        def scaled(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return inputs[0] * scale, *inputs[1:]

        output_layer.register_forward_pre_hook(scaled)
    if cap is not None:

        def capped(module: nn.Module, inputs: Any, output: tuple[Tensor, Any]) -> Any:
            return soft_capped(output[0], cap), output[1]

        output_layer.register_forward_hook(capped)


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Return cap tanh(logits / cap) in the logits' dtype: between -cap and cap."""
    return torch.tanh(logits / cap) * cap
