"""top_k: hand-readable choices, weights and gradients, too few candidates, GShard's second, drops."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.kernels import library as kernels
from megamoe.kernels.choice import Kernels
from megamoe.moe import rng
from megamoe.moe.composition import check_parts
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs
from tests.moe.build import (
    make_hidden,
    make_layer,
    make_part,
    make_router,
    make_scored,
    moe_config,
    route_scores,
)

# As softmax gives for scores log(10 p).
PROBS = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.05, 0.05, 0.4], [0.3, 0.4, 0.2, 0.1]])
SCORES = (PROBS * 10).log()


def test_choices_by_hand() -> None:
    pairs = make_part("selector", "top_k", k=2)(make_scored(SCORES, PROBS), StepContext())
    assert pairs.token_N.tolist() == [0, 0, 1, 1, 2, 2]
    assert pairs.expert_N.tolist() == [3, 2, 0, 3, 1, 0]
    assert pairs.choice_N.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("raw", [0.4, 0.3, 0.5, 0.4, 0.4, 0.3]),
        ("renormalised", [4 / 7, 3 / 7, 5 / 9, 4 / 9, 4 / 7, 3 / 7]),
        ("kept_softmax", [4 / 7, 3 / 7, 5 / 9, 4 / 9, 4 / 7, 3 / 7]),
        ("one", [1.0] * 6),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_weights_by_hand(kind: str, expected: list[float], scale: float) -> None:
    pairs = make_part("selector", "top_k", k=2, weights=kind, scale=scale)(
        make_scored(SCORES, PROBS), StepContext()
    )
    torch.testing.assert_close(pairs.weight_N, scale * torch.tensor(expected))


def test_kept_softmax_takes_the_scores_and_renormalised_the_values() -> None:
    probs_TE, scores_TE = torch.tensor([[0.8, 0.4, 0.1]]), torch.tensor([[math.log(3), 0.0, -1.0]])
    weights = {
        kind: make_part("selector", "top_k", num_experts=3, k=2, weights=kind)(
            make_scored(scores_TE, probs_TE), StepContext()
        )
        for kind in ("kept_softmax", "renormalised")
    }
    torch.testing.assert_close(weights["kept_softmax"].weight_N, torch.tensor([3 / 4, 1 / 4]))
    torch.testing.assert_close(weights["renormalised"].weight_N, torch.tensor([2 / 3, 1 / 3]))


def one_raw(p: Tensor, s: Tensor) -> Tensor:
    return torch.stack([p[0], p[2]])


def one_renormalised(p: Tensor, s: Tensor) -> Tensor:
    return torch.stack([p[0], p[2]]) / (p[0] + p[2])


def one_kept_softmax(p: Tensor, s: Tensor) -> Tensor:
    return torch.stack([s[0].exp(), s[2].exp()]) / (s[0].exp() + s[2].exp())


@pytest.mark.parametrize(
    ("kind", "formula"),
    [("raw", one_raw), ("renormalised", one_renormalised), ("kept_softmax", one_kept_softmax)],
)
def test_gradients_of_the_weights(kind: str, formula: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Of one token that chooses the experts 0 and 2, down to the scores under a sigmoid."""
    selector = make_part("selector", "top_k", k=2, weights=kind, scale=1.5)
    gradients = []
    for plain in (False, True):
        scores_E = torch.tensor([1.5, -0.3, 0.7, -2.0], dtype=torch.float64, requires_grad=True)
        probs_E = 1 / (1 + (-scores_E).exp())
        if plain:
            weight_K = 1.5 * formula(probs_E, scores_E)
        else:
            weight_K = selector(make_scored(scores_E[None], probs_E[None]), StepContext()).weight_N
        (weight_K * torch.tensor([1.0, -3.0])).sum().backward()
        gradients.append(scores_E.grad)
    assert gradients[1] is not None and gradients[1].abs().sum() > 0.01
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_weight_one_has_no_gradient() -> None:
    pairs = make_part("selector", "top_k", weights="one")(
        make_scored(SCORES, PROBS.clone().requires_grad_()), StepContext()
    )
    assert not pairs.weight_N.requires_grad


@pytest.mark.parametrize("kind", ["raw", "renormalised", "kept_softmax", "one"])
def test_a_token_with_few_candidates_has_fewer_pairs(kind: str) -> None:
    candidates_TE = torch.tensor([[True] * 4, [False, True, False, False], [False] * 4])
    scores_TE = SCORES.clone().requires_grad_()
    probs_TE = scores_TE.exp() / 10 * candidates_TE
    pairs = make_part("selector", "top_k", k=2, weights=kind)(
        make_scored(scores_TE, probs_TE, candidates_TE), StepContext()
    )
    assert pairs.token_N.tolist() == [0, 0, 1]
    assert pairs.expert_N.tolist() == [3, 2, 1]
    assert pairs.choice_N.tolist() == [0, 1, 0]
    assert pairs.weight_N[2].item() == pytest.approx(0.05 if kind == "raw" else 1)
    (pairs.weight_N.sum() + scores_TE.sum()).backward()
    assert scores_TE.grad is not None and scores_TE.grad.isfinite().all()


def test_values_that_all_underflow_give_weight_zero() -> None:
    pairs = make_part("selector", "top_k", k=2)(
        make_scored(torch.full((1, 4), -200.0), torch.zeros(1, 4)), StepContext()
    )
    assert pairs.weight_N.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["renormalised", "kept_softmax"])
def test_normalised_weights_are_refused_at_k_1(kind: str) -> None:
    message = f"moe.router.selector: with k: 1 the weights '{kind}' are always 1 .*set weights: raw"
    with pytest.raises(UserError, match=message):
        moe_config(router={"selector": {"k": 1, "weights": kind}})


def test_k_is_at_least_1_and_at_most_the_experts() -> None:
    with pytest.raises(UserError, match="moe.router.selector: k must be at least 1"):
        moe_config(router={"selector": {"k": 0}})
    config = moe_config(num_experts=4, router={"selector": {"k": 5}})
    with pytest.raises(UserError, match="^moe.router.selector: top_k: k is 5, .* only 4 experts .* k <= 4$"):
        check_parts(config, 1)


MANY = 4000


def two_of_four(second: str, probs_E: list[float], evaluate: bool = False, **options: Any) -> Pairs:
    """Many tokens of the same values."""
    probs_TE = torch.tensor([probs_E]).expand(MANY, -1)
    context = StepContext(seed=1, step=options.pop("step", 0))
    selector = make_part("selector", "top_k", second=second, **options).train(not evaluate)
    pairs: Pairs = selector(make_scored(probs_TE.log(), probs_TE), context)
    return pairs


def test_a_random_second_is_sent_where_2_g_2_exceeds_the_draw() -> None:
    """g_2 = 0.15 / 0.75 = 0.2: two fifths of the tokens; with g_2 = 1/2 all; the weights stay."""
    pairs = two_of_four("random", [0.6, 0.15, 0.15, 0.1][::-1])
    sent = (pairs.choice_N == 1).sum().item()
    assert len(pairs.token_N) == MANY + sent
    assert sent / MANY == pytest.approx(0.4, abs=0.04)
    assert pairs.weight_N[pairs.choice_N == 0].unique().tolist() == pytest.approx([0.8])
    assert pairs.weight_N[pairs.choice_N == 1].unique().tolist() == pytest.approx([0.2])
    assert len(two_of_four("random", [0.3, 0.3, 0.2, 0.2]).token_N) == 2 * MANY


def test_a_random_second_exactly() -> None:
    draws_T = rng.uniform(rng.key(1, 0, 1, "second"), torch.arange(MANY), 1, kernels=Kernels())[:, 0]
    pairs = two_of_four("random", [0.6, 0.2, 0.1, 0.1], weights="raw")
    sent_T = torch.bincount(pairs.token_N) == 2
    assert torch.equal(sent_T, draws_T < 2 * 0.2 / 0.8)


def test_a_sampled_second_comes_in_proportion_to_the_rest() -> None:
    pairs = two_of_four("sampled", [0.2, 0.5, 0.0, 0.3])
    assert pairs.expert_N[::2].unique().tolist() == [1]
    share_E = torch.bincount(pairs.expert_N[1::2], minlength=4) / MANY
    torch.testing.assert_close(share_E, torch.tensor([0.4, 0.0, 0.0, 0.6]), atol=0.04, rtol=0)
    assert share_E[1:3].tolist() == [0, 0]
    of_the_last = pairs.expert_N == 3
    torch.testing.assert_close(
        pairs.weight_N[of_the_last], torch.full_like(pairs.weight_N[of_the_last], 0.3 / 0.8)
    )


@pytest.mark.parametrize("second", ["random", "sampled"])
def test_draws_follow_seed_step_and_token_and_rest_in_evaluation(second: str) -> None:
    probs = [0.4, 0.3, 0.2, 0.1]

    def same(a: Pairs, b: Pairs) -> bool:
        return torch.equal(a.token_N, b.token_N) and torch.equal(a.expert_N, b.expert_N)

    assert same(two_of_four(second, probs), two_of_four(second, probs))
    assert not same(two_of_four(second, probs), two_of_four(second, probs, step=1))
    assert not same(two_of_four(second, probs), two_of_four(second, probs, layer=2))
    assert same(two_of_four(second, probs, evaluate=True), two_of_four("best", probs))


@pytest.mark.parametrize("second", ["random", "sampled"])
def test_a_second_that_is_no_candidate_or_has_no_value(second: str) -> None:
    candidates_TE = torch.tensor([[False, False, False, True], [True] * 4, [False] * 4])
    probs_TE = torch.tensor([[0, 0, 0, 1.0], [0, 0, 0, 1.0], [0.0] * 4])
    selector = make_part("selector", "top_k", second=second)
    pairs = selector(make_scored(torch.zeros(3, 4), probs_TE, candidates_TE), StepContext())
    assert pairs.token_N.tolist() == ([0, 1, 1] if second == "sampled" else [0, 1])
    assert pairs.expert_N[:2].tolist() == [3, 3]
    assert 3 not in pairs.expert_N[2:].tolist()


def test_renormalised_over_what_the_capacity_left() -> None:
    """Tokens 0 and 2 keep both, 1 its second alone, by hand; and the gradient of the plain formula."""
    selector = make_part("selector", "top_k", k=2, scale=1.5, renormalise="after_drops")
    keep_N = torch.tensor([True, True, False, True, True, True])
    gradients = []
    for plain in (False, True):
        probs_TE = PROBS.double().requires_grad_()
        if plain:
            p = probs_TE
            first, last = p[0, 3] + p[0, 2], p[2, 1] + p[2, 0]
            weight_N = 1.5 * torch.stack(
                [p[0, 3] / first, p[0, 2] / first, p[1, 3] / p[1, 3], p[2, 1] / last, p[2, 0] / last]
            )
        else:
            pairs = selector.after_drops(selector(make_scored(SCORES, probs_TE), StepContext()).keep(keep_N))
            assert pairs.token_N.tolist() == [0, 0, 1, 2, 2]
            weight_N = pairs.weight_N
        torch.testing.assert_close(
            weight_N, 1.5 * torch.tensor([4 / 7, 3 / 7, 1, 4 / 7, 3 / 7]), check_dtype=False
        )
        (weight_N * torch.tensor([1.0, 2.0, 3.0, 4.0, 7.0])).sum().backward()
        gradients.append(probs_TE.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_renormalised_before_drops_by_default_and_of_nothing() -> None:
    scored, keep_N = make_scored(SCORES, PROBS), torch.tensor([True, True, False, True, True, True])
    kept = make_part("selector", "top_k")(scored, StepContext()).keep(keep_N)
    assert make_part("selector", "top_k").after_drops(kept).weight_N[2].item() == pytest.approx(4 / 9)
    nothing = kept.keep(torch.zeros(5, dtype=torch.bool))
    assert len(make_part("selector", "top_k", renormalise="after_drops").after_drops(nothing).weight_N) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"second": "random", "k": 3}, "second: random is a rule for k: 2, found k: 3; set second: best"),
        (
            {"renormalise": "after_drops", "weights": "raw"},
            "after_drops needs weights: renormalised, found 'raw'",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        moe_config(router={"selector": options})


def test_after_drops_needs_drops() -> None:
    selector = {"renormalise": "after_drops"}
    check_parts(moe_config(router={"selector": selector, "capacity": "per_expert"}), 1)
    with pytest.raises(UserError, match="the capacity 'none' drops nothing, .*after_drops.*set capacity: "):
        check_parts(moe_config(router={"selector": selector}), 1)


def test_the_router_renormalises_after_its_capacity() -> None:
    capacity = {"name": "per_expert", "factor": 0.7, "min_capacity": 0}
    router = make_layer(
        moe_config(num_experts=4, router={"selector": {"renormalise": "after_drops"}, "capacity": capacity})
    ).router
    routing = router(make_hidden(40), StepContext())
    assert len(routing.pairs.token_N) < 80
    total_T = torch.zeros(40).index_add(0, routing.pairs.token_N, routing.pairs.weight_N)
    pairs_T = torch.bincount(routing.pairs.token_N, minlength=40)
    assert set(pairs_T.tolist()) == {0, 1, 2}
    torch.testing.assert_close(total_T, (pairs_T > 0).float())


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("score_function", "shift", "spread"), [("sigmoid", 18.0, 1.0), ("softmax", 0.0, 90.0)]
)
def test_saturated_values_choose_as_exact_ones_would(
    score_function: str, shift: float, spread: float, compiled: bool
) -> None:
    """fp32 ties many p of a token; the choice is that of fp64, whichever kernel makes it."""
    scores_TE = shift + spread * torch.randn(200, 16, generator=torch.Generator().manual_seed(5))
    routing = route_scores(make_router(16, score_function=score_function, selector={"k": 4}), scores_TE)
    exact_TE = (
        scores_TE.double().sigmoid() if score_function == "sigmoid" else scores_TE.double().log_softmax(1)
    )
    assert routing.pairs.expert_N.tolist() == exact_TE.topk(4).indices.flatten().tolist()
    assert (routing.probs_TE.topk(5).values.diff() == 0).any(), "p do not tie, and the test shows nothing"


def test_equal_scores_are_chosen_in_the_order_of_the_experts() -> None:
    """As equal p were, by the compiled kernel; PyTorch's promises no order."""
    if kernels.find_library()[0] is None:
        pytest.skip("no compiled kernels")
    router = make_router(8, score_function="sigmoid", selector={"k": 3})
    assert route_scores(
        router, torch.tensor([[1.0] * 8, [0, 30, 30, 0, 30, 0, 30, 0]])
    ).pairs.expert_N.tolist() == [
        *[0, 1, 2],
        *[1, 2, 4],
    ]
