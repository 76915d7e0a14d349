"""The passes with the choice of kernels that is under test. `use_compiled` sets it; conftest sets it back."""

from collections.abc import Callable
from typing import Any

from megamoe.kernels import adamw, router
from megamoe.kernels import rms_norm as block
from megamoe.kernels.attention import core as attention
from megamoe.kernels.attention import rotary
from megamoe.kernels.choice import Kernels
from megamoe.kernels.experts import ffn as experts
from megamoe.kernels.experts import grouped_gemm as products
from megamoe.kernels.experts import rows
from megamoe.moe import rng

_chosen = [Kernels()]


def use_compiled(wanted: bool) -> None:
    """Let the passes below use the compiled library, or PyTorch's operators."""
    _chosen[0] = Kernels(compiled=wanted)


def kernels() -> Kernels:
    """The choice under test."""
    return _chosen[0]


def _chosen_for(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: function(*arguments, **options, kernels=kernels())


sum_of_squares = _chosen_for(adamw.sum_of_squares)
AdamW = _chosen_for(adamw.AdamW)
causal_attention = _chosen_for(attention.causal_attention)
plain_causal_attention = _chosen_for(attention.plain_causal_attention)
apply_rotary_with_documents = _chosen_for(attention.apply_rotary_with_documents)
rms_norm, apply_rotary = _chosen_for(block.rms_norm), _chosen_for(rotary.apply_rotary)
swiglu_experts = _chosen_for(experts.swiglu_experts)
grouped_product = _chosen_for(products.grouped_product)
masked, softmax, top_k = (_chosen_for(each) for each in (router.masked, router.softmax, router.top_k))
combine, gather, swiglu = (_chosen_for(each) for each in (rows.combine, rows.gather, rows.swiglu))
order_by_key, row_tokens = _chosen_for(rows.Order.by_key), _chosen_for(rows.RowTokens.of)
uniform = _chosen_for(rng.uniform)
