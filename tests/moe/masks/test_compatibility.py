"""Masks among other parts: how many experts a token wants and has, and orders that leave it none."""

from typing import Any

import pytest

from megamoe import registry
from megamoe.moe.part import Mask, StepContext
from megamoe.moe.validation import all_are_step_wide, check_parts, experts_wanted, most_candidates
from tests.support.moe.build import make_hidden, make_layer, moe_config

LEVELS = {"scorer": {"name": "hierarchical", "groups": 4}}
HOME = {"name": "gating_dropout", "rate": 1.0, "ranks": 2}
DROPOUT = {"name": "expert_dropout", "cluster_size": 4}
LIMIT = {"name": "group_limit", "num_groups": 4, "keep": 2}
PRUNE = {"name": "entropy_prune", "num_groups": 4}


def check(*masks: dict[str, Any], num_experts: int = 16, ranks: int = 1, **router: Any) -> None:
    tree = {"masks": list(masks), **router}
    check_parts(moe_config(num_experts=num_experts, router=tree), ranks)


@pytest.mark.parametrize(
    ("router", "wanted"),
    [
        ({"selector": {"k": 3}}, 3),
        ({"selector": {"name": "hierarchical_top_k", "groups": 3, "k": 2}, **LEVELS}, 6),
        ({"selector": {"name": "entropy_aware", "min_k": 3}}, 3),
        ({"selector": "threshold"}, 1),
        ({"selector": "expert_choice"}, 1),
    ],
)
def test_how_many_experts_a_token_wants(router: dict[str, Any], wanted: int) -> None:
    assert experts_wanted(moe_config(num_experts=16, router=router)) == wanted


@pytest.mark.parametrize(
    ("masks", "most"),
    [
        ([], 16),
        ([DROPOUT], 8),
        ([{**DROPOUT, "rate": 0.25}], 12),
        ([{**LIMIT, "keep": 3}], 12),
        ([DROPOUT, {**LIMIT, "keep": 1}], 2),  # of the same groups of four
        ([PRUNE], 16),
        ([{**PRUNE, "bound": 0.0}], 4),
    ],
)
def test_how_many_experts_a_token_may_have(masks: list[dict[str, Any]], most: int) -> None:
    assert most_candidates(moe_config(num_experts=16, router={"masks": masks})) == most


def test_a_sum_over_as_many_experts_as_a_group_has() -> None:
    """Two groups of two chosen: 4 / 2 experts to be summed, of the 2 in a group."""
    limit = {"name": "group_limit", "num_groups": 8, "keep": 2, "score": "sum"}
    levels: dict[str, Any] = {**LEVELS, "selector": {"name": "hierarchical_top_k", "groups": 2, "k": 2}}
    config = moe_config(num_experts=16, router={"masks": [limit], **levels})
    check_parts(config, 1)
    assert make_layer(config)(make_hidden(24)).isfinite().all()


def test_which_masks_have_one_mask_for_all_tokens() -> None:
    """The declarations agree with the masks' results."""
    wide = {"expert_dropout", "gating_dropout"}
    assert not Mask.step_wide
    for options in (DROPOUT, HOME, LIMIT, PRUNE):
        config = moe_config(num_experts=16, router={"masks": [options]})
        part = registry.get_part("mask", str(options["name"]))
        assert part.step_wide == all_are_step_wide(config) == (options["name"] in wide)
        layer = make_layer(config)
        mask_TE = layer.router(make_hidden(24), StepContext()).candidates_TE
        assert mask_TE is not None and not mask_TE.all()
        assert bool((mask_TE == mask_TE[0]).all()) == part.step_wide
    both = moe_config(num_experts=16, router={"masks": [DROPOUT, LIMIT]})
    assert not all_are_step_wide(both) and all_are_step_wide(moe_config())


def test_over_all_experts_one_candidate_has_a_gradient() -> None:
    one: dict[str, Any] = {
        "masks": [{"name": "group_limit", "num_groups": 16, "keep": 1}],
        "selector": {"k": 1, "weights": "raw"},
        "score_function": {"name": "softmax", "over": "all"},
    }
    check(*one["masks"], selector=one["selector"], score_function=one["score_function"])
    layer = make_layer(moe_config(num_experts=16, router=one))
    layer(make_hidden(24)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 1e-4 for p in layer.router.parameters())
