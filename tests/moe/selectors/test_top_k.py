"""top_k: hand-readable choices, weights and gradients, too few candidates, GShard's second, drops."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.kernels import library as kernels
from megamoe.kernels.choice import Kernels
from megamoe.moe import rng
from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs
from tests.support.moe.build import (
    make_hidden,
    make_layer,
    make_part,
    make_router,
    make_scored,
    moe_config,
    route_scores,
    select,
)
from tests.support.moe.draws import check_keys, rows_of

# As softmax gives for scores log(10 p).
PROBS = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.05, 0.05, 0.4], [0.3, 0.4, 0.2, 0.1]])
SCORES = (PROBS * 10).log()


def test_choices_by_hand() -> None:
    pairs = select("top_k", make_scored(SCORES, PROBS))
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
    pairs = select("top_k", make_scored(SCORES, PROBS), weights=kind, scale=scale)
    torch.testing.assert_close(pairs.weight_N, scale * torch.tensor(expected))


@pytest.mark.parametrize("kind", ["raw", "renormalised", "kept_softmax", "one"])
def test_a_token_with_few_candidates_has_fewer_pairs(kind: str) -> None:
    candidates_TE = torch.tensor([[True] * 4, [False, True, False, False], [False] * 4])
    scores_TE = SCORES.clone().requires_grad_()
    probs_TE = scores_TE.exp() / 10 * candidates_TE
    pairs = select("top_k", make_scored(scores_TE, probs_TE, candidates_TE), weights=kind)
    assert pairs.token_N.tolist() == [0, 0, 1]
    assert pairs.expert_N.tolist() == [3, 2, 1]
    assert pairs.choice_N.tolist() == [0, 1, 0]
    assert pairs.weight_N[2].item() == pytest.approx(0.05 if kind == "raw" else 1)
    (pairs.weight_N.sum() + scores_TE.sum()).backward()
    assert scores_TE.grad is not None and scores_TE.grad.isfinite().all()


def test_values_that_all_underflow_give_weight_zero() -> None:
    pairs = select("top_k", make_scored(torch.full((1, 4), -200.0), torch.zeros(1, 4)))
    assert pairs.weight_N.tolist() == [0, 0]


MANY = 4000


def two_of_four(second: str, probs_E: list[float], **options: Any) -> Pairs:
    """Many tokens of the same values."""
    probs_TE = torch.tensor([probs_E]).expand(MANY, -1)
    scored = make_scored(probs_TE.log(), probs_TE)
    return select("top_k", scored, StepContext(seed=1), second=second, **options)


def test_a_random_second_is_sent_where_2_g_2_exceeds_the_draw() -> None:
    """g_2 = 0.15 / 0.75 = 0.2: two fifths of the tokens; with g_2 = 1/2 all; the weights stay."""
    draws_T = rng.uniform(rng.key(1, 0, 1, "second"), torch.arange(MANY), 1, kernels=Kernels())[:, 0]
    pairs = two_of_four("random", [0.6, 0.15, 0.15, 0.1][::-1])
    assert torch.equal(torch.bincount(pairs.token_N) == 2, draws_T < 0.4)
    for choice, weight in ((0, 0.8), (1, 0.2)):
        assert pairs.weight_N[pairs.choice_N == choice].unique().tolist() == pytest.approx([weight])
    assert len(two_of_four("random", [0.3, 0.3, 0.2, 0.2]).token_N) == 2 * MANY


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
def test_a_drawn_second_follows_its_key_and_is_the_best_in_evaluation(second: str) -> None:
    def drawn(context: StepContext, layer: int, evaluate: bool = False, second: str = second) -> Tensor:
        probs_TE = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(rows_of(context), -1)
        scored = make_scored(probs_TE.log(), probs_TE)
        pairs = select("top_k", scored, context, evaluate, second=second, layer=layer)
        sent_TE = torch.zeros(probs_TE.shape, dtype=torch.bool)
        sent_TE[pairs.token_N, pairs.expert_N] = True
        return sent_TE

    check_keys(drawn, least=0.03)
    assert torch.equal(drawn(StepContext(), 1, evaluate=True), drawn(StepContext(), 1, second="best"))


@pytest.mark.parametrize("second", ["random", "sampled"])
def test_a_second_choice_without_candidate_or_probability(second: str) -> None:
    candidates_TE = torch.tensor([[False, False, False, True], [True] * 4, [False] * 4])
    probs_TE = torch.tensor([[0, 0, 0, 1.0], [0, 0, 0, 1.0], [0.0] * 4])
    pairs = select("top_k", make_scored(torch.zeros(3, 4), probs_TE, candidates_TE), second=second)
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
    """The compiled kernel does this as for equal p; PyTorch's kernel promises no order."""
    if kernels.find_library()[0] is None:
        pytest.skip("no compiled kernels")
    router = make_router(8, score_function="sigmoid", selector={"k": 3})
    assert route_scores(
        router, torch.tensor([[1.0] * 8, [0, 30, 30, 0, 30, 0, 30, 0]])
    ).pairs.expert_N.tolist() == [*[0, 1, 2], *[1, 2, 4]]
