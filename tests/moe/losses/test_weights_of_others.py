"""A weight of another program, with the options of docs/route/parts.md: the same loss and gradient as that
program's own function.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.config.layer_kinds import with_weights_of_layer
from tests.support.moe.build import assert_alike, loss_of, make_routing
from tests.support.tiny import tiny, tiny_model

EXPERTS, TOKENS, LAYERS = 8, 30, 3
OF_TRANSFORMERS = {"over_layers": "mean", "sum_of_f": "k"}


def ours(scores_TE: Tensor, name: str, k: int, **options: Any) -> Tensor:
    """The loss of one layer of several, with its weight, which is 0.5."""
    loss = {"weight": 0.5, **options}
    config = tiny(f"moe.router.selector={{name: top_k, k: {k}}}", f"moe.losses={{{name}: {loss}}}")
    (choice,) = with_weights_of_layer(config.moe, LAYERS).losses.values()
    chosen_TK = scores_TE.topk(k).indices.tolist()
    routing = make_routing(chosen_TK, scores_TE, scores_TE.softmax(-1))
    value: Tensor = loss_of(name, routing, dims={"num_choices": k}, **options)
    return choice.options.weight * value


def of_transformers(scores_TE: Tensor, k: int) -> Tensor:
    """All layers are alike, so that this is the share of one of them."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    value: Tensor = load_balancing_loss_func((scores_TE,) * LAYERS, EXPERTS, k)
    return 0.5 * value / LAYERS


def of_megatron(scores_TE: Tensor, k: int) -> Tensor:
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    counts_E = scores_TE.topk(k).indices.flatten().bincount(minlength=EXPERTS)
    return switch_load_balancing_loss_func(scores_TE.softmax(-1), counts_E, TOKENS, k, EXPERTS, 0.5)


def of_deepspeed(scores_TE: Tensor, k: int, whole: bool = False) -> Tensor:
    from deepspeed.moe.sharded_moe import top1gating, top2gating, topkgating

    if whole:
        value: Tensor = topkgating(scores_TE, k, 8.0, 1)[0]
    elif k == 1:
        value = top1gating(scores_TE, 8.0, 1)[0]
    else:
        value = top2gating(scores_TE, 8.0, 1, top2_2nd_expert_sampling=False)[0]
    return 0.5 * value


def of_megablocks(scores_TE: Tensor, k: int) -> Tensor:
    """`batched_load_balancing_loss`, written out: experts * weight / (layers * tokens * k) * counts . P."""
    counts_E = scores_TE.topk(k).indices.flatten().bincount(minlength=EXPERTS).to(scores_TE.dtype)
    scale = EXPERTS * 0.5 / (LAYERS * TOKENS * k)
    return scale * torch.dot(counts_E, scores_TE.softmax(-1).mean(0))


@pytest.mark.parametrize(
    ("theirs", "options"),
    [
        (of_transformers, OF_TRANSFORMERS),
        (of_megatron, {}),
        (lambda scores_TE, k: of_deepspeed(scores_TE, k, whole=True), {}),
        (of_deepspeed, {"first_choice": True}),
        (of_megablocks, {"over_layers": "mean"}),
    ],
    ids=["transformers", "Megatron-Core", "DeepSpeed top-k", "DeepSpeed", "MegaBlocks"],
)
def test_a_balance_weight_of_another_program(
    theirs: Callable[[Tensor, int], Tensor], options: dict[str, Any]
) -> None:
    for k in (1, 2):
        scores_TE = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(k))
        assert_alike(
            lambda given, k=k: ours(given, "switch_balance", k, **options),
            lambda given, k=k: theirs(given, k),
            scores_TE,
            rtol=1e-5,
            atol=1e-7,
        )


def test_a_z_loss_weight_of_megatron_core() -> None:
    from megatron.core.transformer.moe.moe_utils import z_loss_func

    scores_TE = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(1))
    assert_alike(lambda given: ours(given, "z_loss", 2), lambda given: z_loss_func(given, 0.5), scores_TE)


def test_the_model_divides_the_weight_by_its_layers(one_rank: None) -> None:
    losses = "moe.losses={switch_balance: {weight: 0.5, over_layers: mean}, z_loss: 0.25}"
    model = tiny_model(tiny("model.num_layers=5", "moe.layers={at: [1, 3, 4, 5]}", losses))
    assert [layer.losses.weights for _, layer in model.moe_layers()] == [
        {"switch_balance": 0.125, "z_loss": 0.25}
    ] * 4
