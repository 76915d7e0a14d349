"""muP: initial weights, factors and learning rates by width, so that those tuned on a small model fit.

With the width multiplier m = hidden_size / base, where every FFN, the heads together and the latent size of
experts are m times as wide as in the base model:

weight                                    initial std   AdamW's rate    factor in the model
embedding, norms, biases, vectors of
constant experts                          std           lr              1
hidden: attention, FFNs, each expert,
projections of latent experts             std / sqrt(m) lr / m          1
output layer                              std           lr              1 / m on the hidden states
router, mix of shared and of constant
experts                                   std / m       lr / m          1
attention logits                                                        sqrt(base head size) / head size

Sources: Yang et al. 2022 (Tensor Programs V, arXiv 2203.03466), tables 3 and 8. The router as an output
weight, here by table 3, which moves the factor 1 / m into the weight, and experts as hidden weights:
Malasnicki et al. 2025 (arXiv 2508.09752). With `base_layers`, what a block adds to the residual stream is
multiplied by base_layers / num_layers: Dey et al. 2025 (CompleteP, arXiv 2505.01618), alpha = 1, whose rates
do not depend on the depth. At the base nothing changes.
"""

import math
from dataclasses import dataclass, replace

from megamoe.config.model_schema import ModelConfig
from megamoe.config.shapes import head_size


@dataclass(frozen=True)
class Scaling:
    """The factors of a model.

    width: m. depth: on what blocks add to the residual stream.
    """

    width: float
    depth: float

    @classmethod
    def of(cls, model: ModelConfig) -> "Scaling":
        """Return the factors that `model.mup` asks for; without it, all are 1."""
        if model.mup is None:
            return cls(1.0, 1.0)
        return cls(model.hidden_size / model.mup.base, _base_layers(model) / model.num_layers)

    @property
    def hidden_std(self) -> float:
        """The factor on the initial std of hidden weights."""
        return 1 / math.sqrt(self.width)


def _base_layers(model: ModelConfig) -> int:
    """Return the blocks of muP's base model."""
    return (model.mup and model.mup.base_layers) or model.num_layers


def output_std(model: ModelConfig, num_layers: int) -> float:
    """Return the initial std of weights that write into the residual stream of a stack of so many blocks."""
    std = model.init_std * Scaling.of(model).hidden_std
    if model.init_depth_scaling == "none":
        return std
    return std / math.sqrt(2 * (_base_layers(model) if model.mup else num_layers))


def attention_scale(model: ModelConfig) -> float | None:
    """Return the factor of attention logits; None: head size^-0.5. A given one is that of the base model."""
    if model.mup is None or model.mup.base_head_size is None:
        return model.attention.scale
    base, size = model.mup.base_head_size, head_size(model)
    return (model.attention.scale or base**-0.5) * base / size


def logit_scale(model: ModelConfig) -> float:
    """Return the factor of the output layer's logits."""
    return model.logit_scale / Scaling.of(model).width


def residual_scale(model: ModelConfig) -> float:
    """Return the factor of what attention and the FFN or MoE layer add to the residual stream."""
    return model.residual_scale * Scaling.of(model).depth


def without_mup(model: ModelConfig) -> ModelConfig:
    """Return the same model with muP's factors in keys of their own; it is for trained weights."""
    attention = replace(model.attention, scale=attention_scale(model))
    return replace(
        model,
        mup=None,
        attention=attention,
        logit_scale=logit_scale(model),
        residual_scale=residual_scale(model),
    )
