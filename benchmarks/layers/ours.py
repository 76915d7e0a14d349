"""Our MoE layer: linear scorer, softmax score function, top-k, no losses."""

import torch

from layers.candidate import Shape, Weights
from megamoe.config import parse_config
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.part import StepContext
from megamoe.moe.validation import check_parts


def build(shape: Shape, dtype: torch.dtype, weights: Weights) -> MoELayer:
    """Build the layer in training mode, all its weights in the dtype, as training holds them."""
    weighting = "raw" if shape.choices == 1 else "renormalised"
    selector = {"name": "top_k", "k": shape.choices, "weights": weighting}
    router = {"scorer": "linear", "score_function": "softmax", "selector": selector}
    config = parse_config({"moe": {"num_experts": shape.experts, "router": router, "losses": {}}}).moe
    check_parts(config, expert_parallel=1)
    layer_shape = LayerShape(shape.hidden, shape.ffn, 1, "swiglu", 0.02, 0.02, seed=1)
    layer = MoELayer(config, layer_shape, StepContext(seed=1))
    layer.get_parameter("router.scorer.weight").data.copy_(weights.router_EH)
    layer.get_parameter("experts.up").data.copy_(weights.up_EGH)
    layer.get_parameter("experts.down").data.copy_(weights.down_EHF)
    return layer.to(dtype)
