"""An MoE layer of ours by itself, from the tree of its section `moe`."""

from typing import Any

from megamoe.config import parse_config
from megamoe.moe.layer import LayerShape, MoELayer
from megamoe.moe.part import StepContext
from megamoe.moe.validation import check_parts


def build_layer(tree: dict[str, Any], hidden: int, ffn: int, vocab_size: int | None = None) -> MoELayer:
    """Return a layer with SwiGLU experts in fp32.

    Raises:
        UserError: if the tree is wrong.
    """
    config = parse_config({"moe": tree}).moe
    check_parts(config, expert_parallel=1)
    shape = LayerShape(hidden, ffn, 1, "swiglu", 0.02, 0.02, seed=1, vocab_size=vocab_size)
    return MoELayer(config, shape, StepContext(seed=1))
