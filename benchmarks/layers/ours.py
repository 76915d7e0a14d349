"""Our MoE layer: linear scorer, softmax score function, top-k, no losses."""

import torch

from common.moe_layer import build_layer
from layers.candidate import Shape, Weights
from megamoe.moe.layer import MoELayer


def build(shape: Shape, dtype: torch.dtype, weights: Weights) -> MoELayer:
    """Build the layer in training mode, all its weights in the dtype, as training holds them."""
    weighting = "raw" if shape.choices == 1 else "renormalised"
    selector = {"name": "top_k", "k": shape.choices, "weights": weighting}
    router = {"scorer": "linear", "score_function": "softmax", "selector": selector}
    tree = {"num_experts": shape.experts, "router": router, "losses": {}}
    layer = build_layer(tree, shape.hidden, shape.ffn)
    layer.get_parameter("router.scorer.weight").data.copy_(weights.router_EH)
    layer.get_parameter("experts.up").data.copy_(weights.up_EGH)
    layer.get_parameter("experts.down").data.copy_(weights.down_EHF)
    return layer.to(dtype)
