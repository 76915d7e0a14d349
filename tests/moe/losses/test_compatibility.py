"""Losses that could teach nothing are refused, and those that can are not."""

import pytest
import torch

from tests.support.moe.build import make_context, make_hidden, make_layer, moe_config
from tests.support.refusals import Case, cases


@pytest.mark.parametrize("case", cases("moe", "gradient of "))
def test_a_loss_is_refused_exactly_if_it_has_no_gradient(case: Case) -> None:
    """The largest entry of the gradient that it alone sends to the router, up to rounding."""
    (loss, options) = next(iter(case["moe"]["losses"].items()))
    context = make_context(seed=3, step=1, sample_index_B=torch.arange(2), token_ids_T=torch.arange(24))
    layer = make_layer(moe_config(**case["moe"] | {"losses": {loss: {"weight": 1.0, **options}}}), context)
    (layer(make_hidden(24)) * 0).sum().backward()
    largest = max(float(p.grad.abs().max()) for p in layer.router.parameters() if p.grad is not None)
    assert largest < 1e-6 if case["message"] else largest > 1e-4
