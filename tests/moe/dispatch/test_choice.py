"""The nodes of a token's experts, against draws; which dispatch and how many nodes a configuration gets."""

from typing import Any

import pytest
import torch

from megamoe.config import RunConfig, parse_config
from megamoe.moe.dispatch.choice import mean_nodes
from megamoe.moe.dispatch.dispatcher import LocalDispatch
from megamoe.parallel.exchange import with_nodes
from megamoe.parallel.layout import Layout
from tests.support.moe.build import make_layer, moe_config

GROUPS = {"name": "group_limit", "num_groups": 8, "keep": 4, "score": "sum"}


@pytest.mark.parametrize(
    ("experts", "nodes", "choices", "masks"),
    [
        (64, 8, 8, []),
        (8, 2, 2, []),
        (16, 16, 4, []),
        (256, 8, 8, [GROUPS]),
        (64, 4, 6, [{**GROUPS, "keep": 2}]),
    ],
)
def test_the_nodes_of_a_token_are_those_of_draws(
    experts: int, nodes: int, choices: int, masks: list[dict[str, Any]]
) -> None:
    """With limits on more groups than nodes the formula is that of two draws, a little too high."""
    router = {"masks": masks, "selector": {"name": "top_k", "k": choices}}
    moe = moe_config(num_experts=experts, router=router)
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(20_000, experts, generator=generator)
    for mask in masks:
        kept = torch.rand(20_000, mask["num_groups"], generator=generator).topk(mask["keep"]).indices
        open_TG = torch.zeros(20_000, mask["num_groups"]).scatter_(1, kept, 1.0)
        scores = scores * open_TG.repeat_interleave(experts // mask["num_groups"], dim=1)
    node_TK = scores.topk(choices).indices // (experts // nodes)
    drawn = torch.zeros(20_000, nodes).scatter_(1, node_TK, 1.0).sum(1).mean().item()
    found = mean_nodes(moe, nodes, choices)
    assert found == pytest.approx(drawn, rel=0.01 if not masks or nodes == 8 else 0.12)


def test_a_token_has_no_more_nodes_than_experts() -> None:
    moe = moe_config(num_experts=64, router="switch")
    assert mean_nodes(moe, 8, 1.0) == 1.0
    assert 1.0 < mean_nodes(moe, 8, 1.5) < 1.5


def config_of(k: int = 4, **parallel: Any) -> RunConfig:
    moe = {"num_experts": 16, "layers": {"every": 1}, "router": {"selector": {"name": "top_k", "k": k}}}
    return parse_config({"moe": moe, "parallel": {"expert": 8, **parallel}})


@pytest.mark.parametrize(
    ("parallel", "k", "nodes"),
    [
        ({"node_size": 4}, 4, 2),  # auto: 4 experts on 1.9 nodes
        ({"node_size": 2}, 1, 1),  # auto: nothing to save
        ({"node_size": 1}, 2, 1),  # auto: 2 experts on 1.9 nodes
        ({"node_size": 8}, 4, 1),
        ({"node_size": 16}, 4, 1),
        ({"node_size": 2, "exchange": "by_node"}, 1, 4),
        ({"node_size": 2, "exchange": "direct"}, 4, 1),
        ({"node_size": 4, "exchange": "by_node", "expert_tensor": 2}, 4, 4),
        ({"node_size": 4, "exchange": "by_node", "expert": 1}, 4, 1),
    ],
)
def test_between_how_many_nodes(parallel: dict[str, Any], k: int, nodes: int) -> None:
    config = config_of(k, **parallel)
    assert with_nodes(config, Layout.of(config.parallel, 16)).nodes == nodes


def test_the_launcher_says_how_many_ranks_a_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(8)
    for size, nodes in (("4", 2), ("8", 1), ("3", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", size)
        assert with_nodes(config, Layout.of(config.parallel, 16)).nodes == nodes
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert with_nodes(config, Layout.of(config.parallel, 16)).nodes == 1  # nothing is known of nodes


def test_one_rank_sends_nothing() -> None:
    assert isinstance(make_layer(moe_config(num_experts=4)).dispatcher, LocalDispatch)
