"""The balance loss in its three scopes: hand-worked numbers, and gradients of an independent fp64 formula."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.moe.routing import Routing
from tests.support.moe.build import (
    assert_alike,
    loss_of,
    make_context,
    make_part,
    make_router,
    make_routing,
    route_scores,
)

PROBS = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.1, 0.4]])
WANTED = [[0, 1], [0, 2]]  # f = 1/2, 1/4, 1/4; of first choices alone: 1, 0, 0
THREE = make_routing(WANTED, PROBS.log(), PROBS)


def balance_of(routing: Routing, **options: Any) -> float:
    return float(loss_of("switch_balance", routing, **options))


@pytest.mark.parametrize(("first_choice", "expected"), [(False, 1.2), (True, 1.8)])
def test_switch_balance_by_hand(first_choice: bool, expected: float) -> None:
    # P = 0.6, 0.15, 0.25: 3 (0.6/2 + 0.15/4 + 0.25/4) = 1.2 and 3 x 0.6 = 1.8
    assert balance_of(THREE, first_choice=first_choice) == pytest.approx(expected)


def test_switch_balance_sends_its_gradient_through_the_values_alone() -> None:
    scores_TE = PROBS.log().double().requires_grad_()
    loss_of("switch_balance", make_routing(WANTED, scores_TE, scores_TE.softmax(1))).backward()
    # d/ds of 3 sum_i f_i mean_t p_ti is 3/2 p (f - f.p) for each of the two tokens.
    f_E, p_TE = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64), PROBS.double()
    torch.testing.assert_close(scores_TE.grad, 1.5 * p_TE * (f_E - p_TE @ f_E[:, None]))


# Two sequences of three tokens (position by position), E = 3, k = 2; affinities do not sum to 1.
AFFINITIES = torch.tensor(
    [[0.9, 0.5, 0.1], [0.2, 0.8, 0.4], [0.6, 0.7, 0.3], [0.1, 0.9, 0.5], [0.8, 0.1, 0.3], [0.3, 0.2, 0.9]]
)
SEQUENCES = make_context(sample_index_B=torch.tensor([7, 3]))


def plain_sequence_loss(affinities_TE: Tensor, k: int, num_sequences: int) -> Tensor:
    """DeepSeek-V3 eq. 17-20, summed over experts and tokens one by one."""
    num_tokens, num_experts = affinities_TE.shape
    values = []
    for sequence in range(num_sequences):
        tokens = range(sequence, num_tokens, num_sequences)
        for expert in range(num_experts):
            chosen = [t for t in tokens if expert in affinities_TE[t].argsort(descending=True)[:k].tolist()]
            f = num_experts / (k * len(tokens)) * len(chosen)
            shares = [affinities_TE[t, expert] / affinities_TE[t].sum() for t in tokens]
            p = torch.stack(shares).sum() / len(tokens)
            values.append(f * p)
    return torch.stack(values).sum() / num_sequences


def sequence_routing(affinities_TE: Tensor) -> Routing:
    """The chosen expert and p, under a bias and a mask, are all expert 2, which must not count here."""
    routing = make_routing([[2]] * 6, affinities_TE, torch.tensor([[0.0, 0.0, 1.0]] * 6))
    routing.affinities_TE = affinities_TE
    return routing


def sequence_loss(routing: Routing, context: StepContext = SEQUENCES, **options: Any) -> Tensor:
    """k = 2."""
    return loss_of("switch_balance", routing, context, {"num_choices": 2}, scope="sequence", **options)


@pytest.mark.parametrize("first_choice", [False, True])
def test_sequence_scope_is_the_mean_of_the_sequences(first_choice: bool) -> None:
    assert_alike(
        lambda affinities_TE: sequence_loss(sequence_routing(affinities_TE), first_choice=first_choice),
        lambda affinities_TE: plain_sequence_loss(affinities_TE, 1 if first_choice else 2, 2),
        AFFINITIES.double(),
    )


def test_sequence_scope_by_hand() -> None:
    # One sequence of two tokens, k = 1: f = 1/2, 1/2; P = (3/4 + 1/5)/2, (1/4 + 4/5)/2.
    routing = make_routing([[0], [1]], torch.zeros(2, 2), torch.zeros(2, 2))
    routing.affinities_TE = torch.tensor([[0.6, 0.2], [0.2, 0.8]])
    assert balance_of(routing, scope="sequence") == pytest.approx(2 * (0.475 / 2 + 0.525 / 2))
    routing.affinities_TE = torch.tensor([[0.6, 0.2], [0.8, 0.2]])  # f = 1, 0; P = (3/4 + 4/5)/2, ...
    assert balance_of(routing, scope="sequence") == pytest.approx(2 * 0.775)


def test_sequence_scope_counts_no_expert_of_relu_whose_value_is_0() -> None:
    """k = 2, f = (0, 0, 1/3, 2/3) and P = (0, 0, 1/4, 3/4) of two tokens, as nothing fills up the first."""
    affinities_TE = torch.tensor([[0.0, 0.0, 0.0, 2.0], [0.0, 0.0, 1.0, 1.0]])
    routing = make_routing([[3], [2, 3]], affinities_TE, affinities_TE)
    routing.affinities_TE = affinities_TE
    relu = {"num_choices": 2, "score_function": frozenset({"zeros"})}
    found = loss_of("switch_balance", routing, dims=relu, scope="sequence")
    assert found.item() == pytest.approx(4 * (1 / 12 + 1 / 2))
    # Other score functions have no zeros but those that fp32 rounds to 0: f = (1/4, 0, 1/4, 1/2).
    found = loss_of("switch_balance", routing, dims={"num_choices": 2}, scope="sequence")
    assert found.item() == pytest.approx(4 * (1 / 16 + 3 / 8))


# Three micro batches of a step, k = 1, E = 2, and their p.
MICRO_BATCHES = [[[0], [0]], [[1], [0]], [[1], [1]]]
MICRO_PROBS = [
    torch.tensor([[0.9, 0.1], [0.7, 0.3]]),
    torch.tensor([[0.4, 0.6], [0.6, 0.4]]),
    torch.tensor([[0.3, 0.7]] * 2),
]


def global_balance(**options: Any) -> Any:
    return make_part("loss", "switch_balance", 2, scope="global_batch", **options)


def value_of(loss: Any, place: int, step: int = 1) -> float:
    routing = make_routing(MICRO_BATCHES[place], MICRO_PROBS[place].log(), MICRO_PROBS[place])
    return float(loss(routing, make_context(step=step, micro_batch=10 + place)))


def test_alone_and_without_running_the_global_scope_is_the_micro_batch() -> None:
    for place in range(3):
        assert value_of(global_balance(), place) == value_of(make_part("loss", "switch_balance", 2), place)


def test_running_f_grows_over_the_micro_batches_of_a_step() -> None:
    loss = global_balance(running=True)
    # f = 1, 0; then 3/4, 1/4; then 1/2, 1/2. P = 0.8, 0.2; 0.5, 0.5; 0.3, 0.7.
    assert value_of(loss, 0) == pytest.approx(2 * 0.8)
    assert value_of(loss, 1) == pytest.approx(2 * (0.75 * 0.5 + 0.25 * 0.5))
    assert value_of(loss, 2) == pytest.approx(2 * (0.5 * 0.3 + 0.5 * 0.7))
    # The next step begins anew: f = 0, 1.
    assert value_of(loss, 2, step=2) == pytest.approx(2 * 0.7)


def test_a_micro_batch_that_is_computed_again_counts_once() -> None:
    loss, again = global_balance(running=True), global_balance(running=True)
    once = [value_of(loss, place) for place in range(3)]
    twice = [(value_of(again, place), value_of(again, place)) for place in range(3)]
    assert [pair[0] for pair in twice] == once and [pair[1] for pair in twice] == once
    # Later ones do not show when the first is computed again after them.
    assert [value_of(again, place) for place in range(3)] == once


def test_evaluation_leaves_no_trace_in_the_running_f() -> None:
    loss = global_balance(running=True)
    value_of(loss, 0)
    assert value_of(loss.eval(), 2) == pytest.approx(2 * 0.7)  # f of its own micro batch
    assert value_of(loss.train(), 1) == pytest.approx(2 * (0.75 * 0.5 + 0.25 * 0.5))
    assert not loss.state_dict()


@pytest.mark.parametrize(("first_choice", "expected"), [(False, 0.9), (True, 1.8)])
def test_the_first_choices_probabilities_alone(first_choice: bool, expected: float) -> None:
    """XMoE's text: expert 0 is first twice, P = (0.7 + 0.5)/2, 0, 0; f = 1/2, 1/4, 1/4 or 1, 0, 0."""
    found = balance_of(THREE, probs="first_choice", first_choice=first_choice)
    assert found == pytest.approx(expected)


def test_restricted_sequences_count_what_was_wanted() -> None:
    """DeepSeek-V2: two sequences of one token each; unrestricted, both would have counted expert 0."""
    context = make_context(sample_index_B=torch.tensor([0, 1]))
    routing = make_routing([[1], [2]], PROBS.log(), PROBS)
    of_sequences: dict[str, Any] = {"scope": "sequence", "context": context}
    for restricted, expected in ((True, 3 * (0.2 + 0.4) / 2), (False, 3 * (0.7 + 0.5) / 2)):
        assert balance_of(routing, **of_sequences, restricted=restricted) == pytest.approx(expected)
    twice = make_routing([[1, 0], [2, 0]], PROBS.log(), PROBS)
    found = balance_of(twice, **of_sequences, restricted=True, first_choice=True)
    assert found == pytest.approx(3 * (0.2 + 0.4) / 2)


def test_values_of_a_sigmoid_are_taken_over_their_sum() -> None:
    """Twice the values are the same shares: the loss cannot fall by shrinking them."""
    half = make_routing(WANTED, PROBS.log(), 0.5 * PROBS)
    for routing in (THREE, half):
        assert balance_of(routing, dims={"score_function": "sigmoid"}) == pytest.approx(1.2)
    assert balance_of(half) == pytest.approx(0.6)


def test_over_all_experts_p_of_the_candidates_sum_to_1_in_the_loss() -> None:
    """Otherwise a token's loss would fall as it prefers experts that its limit closed."""
    limit = {"name": "group_limit", "num_groups": 4, "keep": 2}
    scores_TE = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))

    def value(over: str, scores_TE: Tensor) -> Tensor:
        router = make_router(8, masks=[limit], score_function={"name": "softmax", "over": over})
        return loss_of("switch_balance", route_scores(router, scores_TE))

    assert_alike(partial(value, "candidates"), partial(value, "all"), scores_TE)


def test_sequence_scope_counts_by_scores_whose_p_round_to_1() -> None:
    """Both tokens' largest score is expert 2's: f = 1 there, and P nearly 1/4."""
    router = make_router(4, score_function="sigmoid", selector={"k": 1, "weights": "raw"})
    routing = route_scores(router, torch.tensor([[18.0, 18, 20, 19], [19.0, 18, 30, 19]]))
    routing.affinities_TE = torch.tensor([[0.1, 0.2, 0.6, 0.1]] * 2)  # to tell the experts by
    assert balance_of(routing, scope="sequence") == pytest.approx(4 * 0.6)
    routing.affinities_TE = torch.tensor([[0.4, 0.4, 0.1, 0.1]] * 2)
    assert balance_of(routing, scope="sequence") == pytest.approx(4 * 0.1)
