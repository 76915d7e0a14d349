"""GRPO of the routing: against a plain fp64 formula written token by token, and on a tiny problem."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.moe.routing import Routing
from megamoe.zoo.losses.grpo import EPSILON
from tests.support.moe.build import (
    assert_alike,
    make_context,
    make_hidden,
    make_layer,
    make_part,
    make_routing,
    moe_config,
)

# Two positions, two sequences, two rollouts: token s * 4 + g * 2 + b.
ROLLOUTS, SEQUENCES, LENGTH, EXPERTS = 2, 2, 2, 4
TOKENS = LENGTH * ROLLOUTS * SEQUENCES
GENERATOR = torch.Generator().manual_seed(3)
SCORES, OLD, REFERENCE = torch.randn(3, TOKENS, EXPERTS, generator=GENERATOR, dtype=torch.float64).unbind()
LOSSES = torch.rand(TOKENS, generator=GENERATOR, dtype=torch.float64) * 3
K1 = [[0], [1], [2], [3], [3], [2], [1], [0]]
K2 = [[0, 1], [1, 3], [2, 0], [3, 2], [3, 1], [2, 3], [1, 0], [0, 2]]
CONTEXT = make_context(num_rollouts=ROLLOUTS, sample_index_B=torch.arange(ROLLOUTS * SEQUENCES) % SEQUENCES)


def routing_of(scores_TE: Tensor, wanted: list[list[int]], candidates_TE: Tensor | None = None) -> Routing:
    routing = make_routing(wanted, scores_TE, scores_TE.softmax(1))
    routing.candidates_TE = candidates_TE
    routing.extras |= {"sampling_scores_TE": OLD, "reference_scores_TE": REFERENCE}
    return routing


def plain_loss(
    scores_TE: Tensor,
    wanted: list[list[int]],
    losses: list[float],
    candidates: list[list[int]],
    clip: float = 0.2,
    kl: float = 0.04,
) -> Tensor:
    """The definition, token by token, probabilities and not logarithms."""
    total = torch.zeros((), dtype=torch.float64)
    for s, g, b in itertools.product(range(LENGTH), range(ROLLOUTS), range(SEQUENCES)):
        token = s * 4 + g * 2 + b
        rewards = [-losses[s * 4 + other * 2 + b] for other in range(ROLLOUTS)]
        mean = sum(rewards) / ROLLOUTS
        deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / ROLLOUTS)
        advantage = (rewards[g] - mean) / (deviation + EPSILON)

        def policy(row_E: Tensor, token: int = token) -> dict[int, Tensor]:
            whole = sum(row_E[e].exp() for e in candidates[token])
            return {e: row_E[e].exp() / whole for e in candidates[token]}

        pi, old, reference = policy(scores_TE[token]), policy(OLD[token]), policy(REFERENCE[token])
        ratio: Any = 1.0
        for place, expert in enumerate(wanted[token]):
            before = wanted[token][:place]
            new_one = pi[expert] / (1 - sum(pi[e] for e in before))
            ratio = ratio * new_one / (old[expert] / (1 - sum(old[e] for e in before)))
        clipped = min(max(ratio, torch.tensor(1 - clip)), torch.tensor(1 + clip))
        gain = min(ratio * advantage, clipped * advantage)
        total = total + kl * sum(pi[e] * (pi[e] / reference[e]).log() for e in pi) - gain
    return total / TOKENS


ALL = [list(range(EXPERTS))] * TOKENS
SOME = [[0, 1, 2], [1, 3], [0, 2, 3], [0, 2, 3], [1, 3], [2, 3], [0, 1], [0, 1, 2]]  # some just those drawn


# Three draws, some tokens with fewer candidates than that.
SCARCE = [[0, 1], [3], [0, 2, 3], [0, 2, 3], [0, 1, 3], [2], [0, 1], [0, 1, 2, 3]]
K3 = [[1, 0], [3], [0, 3, 2], [2, 0, 3], [3, 1, 0], [2], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize(
    ("candidates", "wanted"),
    [(ALL, K1), (ALL, K2), (SOME, K1), (SOME, K2), (SCARCE, K3)],
    ids=["all-1", "all-2", "some-1", "some-2", "scarce-3"],
)
@pytest.mark.parametrize("options", [{}, {"clip": 0.5, "kl": 2.0}, {"kl": 0.0}], ids=str)
def test_value_and_gradient(
    candidates: list[list[int]], wanted: list[list[int]], options: dict[str, Any]
) -> None:
    mask_TE = None
    if candidates is not ALL:
        mask_TE = torch.tensor([[e in row for e in range(EXPERTS)] for row in candidates])
    part = make_part("loss", "grpo", dims={"num_choices": max(map(len, wanted))}, **options)
    assert_alike(
        lambda scores_TE: part(routing_of(scores_TE, wanted, mask_TE), CONTEXT, LOSSES),
        lambda scores_TE: plain_loss(scores_TE, wanted, LOSSES.tolist(), candidates, **options),
        SCORES,
    )


def test_the_cases_clip_on_both_sides_and_neither() -> None:
    """So that the test above sees each branch."""
    ratio_T = (SCORES.softmax(1) / OLD.softmax(1))[torch.arange(TOKENS), torch.tensor(K1)[:, 0]]
    assert (ratio_T > 1.2).any() and (ratio_T < 0.8).any()
    routing = routing_of(SCORES.clone().requires_grad_(), K1)
    free, tight = (
        make_part("loss", "grpo", clip=clip, kl=0.0)(routing, CONTEXT, LOSSES) for clip in (0.999, 0.01)
    )
    assert free.item() < tight.item()  # the bound only ever takes gain away


def test_the_advantage_by_hand() -> None:
    """On policy the ratio is 1 and the gradient is -A grad log pi / T; A is +-1 for two rollouts."""
    scores_TE = OLD.clone().requires_grad_()
    losses_T = torch.tensor([1.0, 5.0, 3.0, 5.0, 0.0, 2.0, 0.0, 1.0])
    make_part("loss", "grpo", kl=0.0)(routing_of(scores_TE, K1), CONTEXT, losses_T).backward()
    # Token 0 (loss 1) against token 2 (loss 3); 1 and 3 are equal; 4 and 6 are masked; 5 against 7.
    advantage_T = torch.tensor([1.0, 0.0, -1.0, 0.0, 0.0, -1.0, 0.0, 1.0])
    chosen_TE = torch.nn.functional.one_hot(torch.tensor(K1)[:, 0], EXPERTS)
    expected_TE = -advantage_T[:, None] * (chosen_TE - OLD.softmax(1)) / TOKENS
    assert scores_TE.grad is not None
    torch.testing.assert_close(scores_TE.grad, expected_TE, rtol=1e-3, atol=1e-9)
    assert not scores_TE.grad[[1, 3, 4, 6]].any()  # exactly


@pytest.mark.parametrize("num_rollouts", [3, 5, 7])
def test_equal_losses_give_exactly_no_advantage(num_rollouts: int) -> None:
    """Their mean may round, and what it rounds to must not be blown up by the deviation's."""
    losses_T = torch.full((num_rollouts,), 0.1)
    scores_TE = torch.randn(num_rollouts, EXPERTS, requires_grad=True)
    routing = make_routing([[0]] * num_rollouts, scores_TE, scores_TE.softmax(1))
    routing.extras |= {name: scores_TE.detach() for name in ("sampling_scores_TE", "reference_scores_TE")}
    context = make_context(num_rollouts=num_rollouts, sample_index_B=torch.zeros(num_rollouts))
    make_part("loss", "grpo", kl=0.0)(routing, context, losses_T).backward()
    assert scores_TE.grad is not None and not scores_TE.grad.any()


def test_a_token_without_candidates_gives_finite_results() -> None:
    scores_TE = SCORES.clone().requires_grad_()
    candidates_TE = torch.ones(TOKENS, EXPERTS, dtype=torch.bool)
    candidates_TE[0] = False
    routing = routing_of(scores_TE, [[], *K1[1:]], candidates_TE)
    loss = make_part("loss", "grpo")(routing, CONTEXT, LOSSES)
    loss.backward()
    assert scores_TE.grad is not None
    assert loss.isfinite() and scores_TE.grad.isfinite().all() and not scores_TE.grad[0].any()


def test_sharp_policies_stay_finite_and_exact() -> None:
    """The first expert has all but 1e-13 of the probability: 1 - p is 0 in fp32, the second draw is not."""
    scores_TE = torch.tensor([[30.0, 0.0, -1.0, 0.0]] * 2).requires_grad_()
    routing = make_routing([[0, 1], [0, 2]], scores_TE, scores_TE.softmax(1))
    old_TE = torch.tensor([[30.0, 0.0, 0.0, 0.0]] * 2)
    routing.extras |= {"sampling_scores_TE": old_TE, "reference_scores_TE": old_TE}
    context = make_context(num_rollouts=2, sample_index_B=torch.zeros(2))
    part = make_part("loss", "grpo", dims={"num_choices": 2}, kl=0.0, clip=0.99)
    loss = part(routing, context, torch.tensor([1.0, 3.0]))
    rest = 2 + math.exp(-1)
    ratios = 3 / rest, 3 * math.exp(-1) / rest
    assert loss.item() == pytest.approx(-(ratios[0] - ratios[1]) / 2, rel=1e-3)
    loss.backward()
    assert scores_TE.grad is not None and scores_TE.grad.isfinite().all()


def test_grpo_raises_the_probability_of_the_better_expert() -> None:
    """The token's loss is smallest at expert 2, and no other loss trains the policy."""
    tree = {
        "num_experts": 4,
        "router": {"scorer": "policy", "selector": {"name": "sample", "weights": "one"}},
        "losses": {"grpo": {"weight": 1.0, "rollouts": 4, "kl": 0.01}},
    }
    context = make_context(seed=1, num_rollouts=4, sample_index_B=torch.zeros(4))
    layer = make_layer(moe_config(**tree), context)
    scorer: Any = layer.router.scorer
    hidden_TH = make_hidden(8).mul(0.1).add(1).repeat_interleave(4, 0)
    torch.nn.init.zeros_(scorer.weight)
    scorer.old_weight.zero_()
    scorer.reference_weight.zero_()
    cost_E = torch.tensor([1.0, 2.0, 0.2, 1.5])
    optimizer = torch.optim.SGD(scorer.parameters(), lr=0.05)
    better = []
    for step in range(40):
        context.step = step
        layer(hidden_TH)
        assert layer.routing is not None
        better.append(layer.routing.probs_TE[:, 2].mean().item())
        expert_T = layer.routing.wanted.expert_N
        optimizer.zero_grad()
        layer.objective(cost_E[expert_T]).backward()
        optimizer.step()
        layer.after_step(torch.zeros(4, dtype=torch.int64))
    assert better[0] == pytest.approx(0.25)
    assert better[-1] > 0.8
    assert (layer.eval().router(hidden_TH, context).pairs.expert_N == 2).all()


def test_a_routing_without_gradient_is_refused() -> None:
    with pytest.raises(UserError, match="grpo: the routing carries no gradient.* set model.recompute: none"):
        make_part("loss", "grpo")(routing_of(SCORES, K1), CONTEXT, LOSSES)
