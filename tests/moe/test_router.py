"""The router's stages together: what choices are made by, which p are the weights, which experts are open."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import Mask, ScoreFunction, StepContext
from megamoe.moe.routing import Scored
from tests.support.moe.build import make_router, make_scored, route_scores

LIMIT = {"name": "group_limit", "num_groups": 4, "keep": 2}
RAW = {"name": "top_k", "k": 2, "weights": "raw"}
SCORES = torch.tensor([[2.0, 1, 0, 0, 1.5, 0, 0, 1]])  # groups of two: the first and the third are kept


def chosen(router: Any, scores: list[float], **extras: Any) -> list[int]:
    return route_scores(router, torch.tensor([scores]), **extras).pairs.expert_N.tolist()


def test_the_weights_of_deepseek_v2_are_its_softmax_over_all_experts() -> None:
    router = make_router(8, "deepseek_v2", masks=[LIMIT], selector=RAW, capacity="none")
    routing = route_scores(router, SCORES)
    assert routing.pairs.expert_N.tolist() == [0, 4]
    expected_N = SCORES[0].double().exp()[[0, 4]] / SCORES[0].double().exp().sum()
    torch.testing.assert_close(routing.pairs.weight_N, expected_N.float())
    torch.testing.assert_close(routing.pairs.weight_N, torch.tensor([0.347, 0.210]), atol=5e-4, rtol=0)
    assert routing.probs_TE[0].nonzero().flatten().tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize(
    ("preset", "over"), [("deepseek_v2", "all"), ("deepseek_moe", "all"), ("moec", "candidates")]
)
def test_what_a_presets_softmax_runs_over(preset: str, over: str) -> None:
    assert make_router(48, preset).score_function.config.over == over


def test_a_softmax_over_the_candidates_is_the_default() -> None:
    routing = route_scores(make_router(8, masks=[LIMIT], selector=RAW), SCORES)
    kept = SCORES[0, [0, 1, 4, 5]].exp().sum()
    torch.testing.assert_close(routing.pairs.weight_N, SCORES[0, [0, 4]].exp() / kept)


def test_shares_of_p_are_the_same_over_all_and_over_the_candidates() -> None:
    scores_TE = 2 * torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    for selector in (
        {"name": "top_k", "k": 2, "weights": "renormalised"},
        {"name": "top_k", "k": 2, "weights": "kept_softmax"},
        {"name": "top_k", "k": 2, "second": "random"},
        {"name": "top_k", "k": 2, "second": "sampled"},
        {"name": "sample", "k": 2, "weights": "renormalised"},
        {"name": "entropy_aware", "weights": "renormalised"},
    ):
        routings = [
            route_scores(
                make_router(
                    8, masks=[LIMIT], selector=selector, score_function={"name": "softmax", "over": over}
                ),
                scores_TE,
            )
            for over in ("candidates", "all")
        ]
        found, other = (routing.pairs for routing in routings)
        assert torch.equal(found.expert_N, other.expert_N) and torch.equal(found.token_N, other.token_N)
        torch.testing.assert_close(found.weight_N, other.weight_N)


@pytest.mark.parametrize("score_function", [{"name": "softmax", "over": "all"}, {"name": "sigmoid"}], ids=str)
def test_a_score_function_over_all_experts_is_computed_once(score_function: dict[str, str]) -> None:
    router = make_router(8, masks=[LIMIT], selector=RAW, score_function=score_function)
    calls: list[object] = []
    router.score_function.register_forward_hook(lambda module, inputs, probs_TE: calls.append(inputs))
    scores_TE = SCORES.clone().requires_grad_()
    routing = route_scores(router, scores_TE)
    assert len(calls) == 1
    torch.testing.assert_close(routing.probs_TE, router.score_function(scores_TE, routing.candidates_TE))
    gradients = [
        torch.autograd.grad((probs_TE * torch.arange(8.0)).sum(), scores_TE)[0]
        for probs_TE in (routing.probs_TE, router.score_function(scores_TE, routing.candidates_TE))
    ]
    torch.testing.assert_close(*gradients)


SATURATED = [17.0, 18.0, 20.0, 19.0]  # fp32's sigmoid of the last three is 1


def test_choices_are_by_the_scores_where_fp32_rounds_p() -> None:
    assert chosen(
        make_router(4, score_function="sigmoid", selector={"k": 1, "weights": "raw"}), SATURATED
    ) == [2]
    kept_softmax = make_router(4, selector={"k": 2, "weights": "kept_softmax"})
    assert chosen(kept_softmax, [150.0, 0.0, 10.0, 20.0]) == [0, 3]
    limited = make_router(4, selector={"k": 3}, masks=[{**LIMIT, "num_groups": 4, "keep": 3}])
    assert chosen(limited, [150.0, 0.0, 10.0, 20.0]) == [0, 3, 2]


def test_weights_and_gradients_stay_those_of_p() -> None:
    scores_TE = torch.tensor([[17.0, -3.0, 2.0, 1.0]], requires_grad=True)
    routing = route_scores(make_router(4, score_function="sigmoid", selector=RAW), scores_TE)
    torch.testing.assert_close(routing.pairs.weight_N, scores_TE[0, [0, 2]].sigmoid())
    assert not routing.ranking_TE.requires_grad
    routing.pairs.weight_N.sum().backward()
    p_2 = torch.tensor(2.0).sigmoid()
    torch.testing.assert_close(scores_TE.grad[0, 2], p_2 * (1 - p_2))  # type: ignore[index]
    assert scores_TE.grad[0, [1, 3]].tolist() == [0, 0]  # type: ignore[index]


@pytest.mark.parametrize("masks", [[], [LIMIT]], ids=["free", "limited"])
def test_ranking_by_scores_takes_no_pass_of_its_own(masks: list[dict[str, Any]]) -> None:
    scores_TE = torch.randn(5, 8)
    routing = route_scores(make_router(8, masks=masks), scores_TE)
    if not masks:
        assert routing.ranking_TE.data_ptr() == routing.scores_TE.data_ptr()
    open_TE = torch.ones(5, 8, dtype=torch.bool) if routing.candidates_TE is None else routing.candidates_TE
    assert torch.equal(routing.ranking_TE, scores_TE.masked_fill(~open_TE, -torch.inf))


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_with_a_bias_p_in_fp32_decides_as_in_deepseek_v3(score_function: str) -> None:
    scores = SATURATED if score_function == "sigmoid" else [150.0, 0.0, 10.0, 20.0]
    router = make_router(4, score_function={"name": score_function, "bias_update": 0.1}, selector={"k": 2})
    assert router.score_function.bias_E is not None
    router.score_function.bias_E.copy_(torch.tensor([0.0, 0.3, 0.0, 0.1]))
    routing = route_scores(router, torch.tensor([scores]))
    torch.testing.assert_close(routing.ranking_TE, routing.probs_TE + router.score_function.bias_E)
    assert routing.pairs.expert_N.tolist() == ([1, 3] if score_function == "sigmoid" else [0, 1])


def test_what_a_scorer_ranks_by_takes_the_place_of_the_scores() -> None:
    ranking_TE = torch.tensor([[0.0, 3.0, 0.0, 4.0]])
    for masks in ([], [{**LIMIT, "keep": 3}]):
        router = make_router(4, score_function="sigmoid", masks=masks)
        assert chosen(router, SATURATED, ranking_TE=ranking_TE) == [3, 1]


class MinusSigmoid(ScoreFunction):
    """A plugin's score function, p falling with the score, of which it declares nothing."""

    def forward(self, scores_TE: Tensor, candidates_TE: Tensor | None) -> Tensor:
        probs_TE = (-scores_TE).sigmoid()
        return probs_TE if candidates_TE is None else probs_TE * candidates_TE


def test_a_score_function_that_declares_nothing_is_ranked_by_its_p() -> None:
    for masks in ([], [{**LIMIT, "keep": 2}], [{**LIMIT, "keep": 3, "num_groups": 4}]):
        router = make_router(4, masks=masks, selector=RAW)
        router.score_function = MinusSigmoid(ScoreFunction.Config(), router.dims)
        routing = route_scores(router, torch.tensor([[3.0, -1.0, 0.5, 0.0]]))
        assert routing.pairs.expert_N.tolist() == [1, 3]
        torch.testing.assert_close(routing.pairs.weight_N, torch.tensor([1.0, 0.0]).sigmoid())


def test_a_monotone_score_function_defines_its_logarithm() -> None:
    with pytest.raises(NotImplementedError, match="MinusSigmoid is monotone and must define log_values"):
        MinusSigmoid(ScoreFunction.Config(), make_router(4).dims).log_values(SCORES)


class FirstHalf(Mask):
    """The same mask for all tokens, which declares itself one of the step or one by token."""

    @dataclass
    class Config:
        step_wide: bool = False

    def __init__(self, config: Config, dims: Any) -> None:
        super().__init__(config, dims)
        self.step_wide = config.step_wide

    def forward(self, scored: Scored, context: StepContext) -> Tensor:
        expert_E = torch.arange(scored.num_experts)
        return (expert_E < scored.num_experts // 2).expand_as(scored.scores_TE)


@pytest.mark.parametrize("num_tokens", [24, 0])
def test_which_experts_are_open_is_what_masks_declare_of_themselves(num_tokens: int) -> None:
    scores_TE = torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(2))
    capacity = {"name": "per_expert", "factor": 1.0, "min_capacity": 0}
    for step_wide in (False, True):
        router = make_router(8, selector={"k": 2}, capacity=capacity)
        assert route_scores(router, scores_TE).open_E is None
        router.masks.append(FirstHalf(FirstHalf.Config(step_wide), router.dims))
        routing = route_scores(router, scores_TE)
        assert routing.candidates_TE is not None and not routing.candidates_TE[:, 4:].any()
        assert (routing.open_E is not None) == step_wide
        if num_tokens:
            # k T / E = 6 slots, 12 where a mask of the step closes half of the experts.
            assert cast(Any, router.capacity).slots(num_tokens, routing.open_E) == (12 if step_wide else 6)
            assert routing.counts_E().max() == (12 if step_wide else 6)


def test_several_masks_of_the_step_leave_what_all_of_them_left() -> None:
    dropout = {"name": "expert_dropout", "cluster_size": 4}
    home = {"name": "gating_dropout", "ranks": 2, "rate": 1.0}
    router = make_router(16, masks=[dropout, home, LIMIT])
    context = StepContext(step=1)
    routing = route_scores(router, torch.randn(24, 16, generator=torch.Generator().manual_seed(3)), context)
    masks = [mask(make_scored(torch.zeros(1, 16)), context)[0] for mask in router.masks[:2]]
    assert routing.open_E is not None and torch.equal(routing.open_E, masks[0] & masks[1])
    assert routing.open_E.sum() == 4
    assert routing.of_tokens(3, 5).open_E is routing.open_E
