"""The device's budget by hand, against a plain loop, and by the statistics of the spared sequences."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megamoe.moe.part import StepContext
from megamoe.moe.routing import Pairs, Scored
from tests.support.moe.build import (
    make_context,
    make_pairs,
    make_part,
    make_router,
    make_scored,
    route_scores,
)

# Two devices of two experts. Device 0 is offered 0.5, 0.3 | 0.6, 0.2 | 0.7, device 1 only 0.1.
WANTED = [[0, 1], [1, 0], [0, 2]]
AFFINITIES = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.2, 0.6, 0.1, 0.1], [0.7, 0.1, 0.1, 0.1]])
SCORED = make_scored(AFFINITIES.log(), AFFINITIES)


def make_device(num_experts: int = 4, dims: dict[str, Any] | None = None, **options: Any) -> Any:
    options = {"devices": 2, "spare": 0.0, **options}
    return make_part("capacity", "device", num_experts, dims={"num_choices": 2, **(dims or {})}, **options)


def keep(**options: Any) -> list[int]:
    keep_N = make_device(**options)(make_pairs(WANTED), SCORED, StepContext())
    assert keep_N.dtype == torch.bool
    return keep_N.int().tolist()


@pytest.mark.parametrize(
    ("factor", "budget", "expected"),
    [
        (1.0, 3, [1, 0, 1, 0, 1, 1]),  # without 0.3 and 0.2
        (0.4, 2, [0, 0, 1, 0, 1, 1]),  # 1.2: without 0.5 too, although its expert has only two pairs
        (1.1, 4, [1, 1, 1, 0, 1, 1]),  # 3.3
        (2.0, 6, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_the_budget_is_the_ceiling_of_the_formula(factor: float, budget: int, expected: list[int]) -> None:
    assert make_device(factor=factor).budget(3) == budget
    assert keep(factor=factor) == expected


def test_devices_are_the_expert_parallel_ranks_by_default() -> None:
    assert make_device(devices=None, dims={"expert_parallel": 2}).num_devices == 2
    assert keep(devices=None, dims={"expert_parallel": 2}) == keep(devices=2)
    assert keep(devices=None) == [1] * 6  # one device: all pairs are its own
    assert keep(devices=4) == [1, 1, 1, 0, 1, 1]  # one expert each, B = 2: of expert 0 without 0.2


def test_affinities_are_those_before_masks() -> None:
    scored = make_scored(AFFINITIES.log(), AFFINITIES)
    scored.probs_TE = torch.tensor([[0.0, 1.0, 0, 0], [1.0, 0.0, 0, 0], [0.0, 0, 1.0, 0]], requires_grad=True)
    keep_N = make_device()(make_pairs(WANTED), scored, StepContext())
    assert keep_N.int().tolist() == [1, 0, 1, 0, 1, 1]
    assert not keep_N.requires_grad


def test_evaluation_drops_nothing_by_default() -> None:
    pairs = make_pairs(WANTED)
    assert make_device().eval()(pairs, SCORED, StepContext()) is None
    message = make_device(eval_factor=0.4, spare=0.99).eval()
    assert message(pairs, SCORED, StepContext()).int().tolist() == [0, 0, 1, 0, 1, 1]


def random_problem(sequences: int, length: int) -> tuple[Pairs, Scored, StepContext]:
    generator = torch.Generator().manual_seed(4)
    scores_TE = torch.randn(sequences * length, 8, generator=generator) + torch.tensor([2.0] * 2 + [0.0] * 6)
    probs_TE = scores_TE.softmax(-1)
    context = make_context(seed=3, step=1, sample_index_B=torch.arange(sequences) + 70)
    return make_pairs(probs_TE.topk(2).indices.tolist()), make_scored(scores_TE, probs_TE), context


def plain_keep(
    pairs: Pairs, probs_TE: Tensor, spared: set[int], num_sequences: int, budget: int
) -> list[bool]:
    """Each device takes the spared sequences' pairs, then the others' by p while there is room."""
    kept = [False] * len(pairs.token_N)
    for device in range(4):
        mine = [n for n in range(len(kept)) if int(pairs.expert_N[n]) // 2 == device]
        safe = [n for n in mine if int(pairs.token_N[n]) % num_sequences in spared]
        rest = [n for n in mine if n not in safe]
        rest.sort(key=lambda n: -float(probs_TE[pairs.token_N[n], pairs.expert_N[n]]))
        for n in safe + rest[: max(0, budget - len(safe))]:
            kept[n] = True
    return kept


@pytest.mark.parametrize("spare", [0.3, 0.7])
def test_spared_sequences_keep_their_pairs_and_count_first(spare: float) -> None:
    pairs, scored, context = random_problem(10, 6)
    part = make_device(8, devices=4, spare=spare)
    spared = {b for b in range(10) if part._spared_T(60, torch.device("cpu"), context)[b]}
    assert 0 < len(spared) < 10
    keep_N = part(pairs, scored, context)
    assert keep_N.tolist() == plain_keep(pairs, scored.probs_TE, spared, 10, budget=30)
    load_D = torch.bincount(pairs.expert_N[keep_N] // 2, minlength=4)
    assert load_D[0] > 30 if spare == 0.7 else load_D[0] == 30  # beyond the budget only by the spared


def test_a_share_of_all_sequences_is_spared_the_same_in_every_layer() -> None:
    context = make_context(seed=3, step=5, sample_index_B=torch.arange(4000))
    parts = [make_part("capacity", "device", 4, layer=layer, devices=2, spare=0.1) for layer in (1, 2)]
    spared_T, again_T = (part._spared_T(8000, torch.device("cpu"), context) for part in parts)
    assert torch.equal(spared_T, again_T)
    assert torch.equal(spared_T[:4000], spared_T[4000:])  # both tokens of a sequence
    assert abs(spared_T.float().mean() - 0.1) < 4 * (0.09 / 4000) ** 0.5
    later = make_context(seed=3, step=5, sample_index_B=torch.arange(4000)[3000:])  # by their numbers
    assert torch.equal(parts[0]._spared_T(1000, torch.device("cpu"), later), spared_T[3000:4000])
    context.step = 6
    assert not torch.equal(parts[0]._spared_T(8000, torch.device("cpu"), context), spared_T)


COLLAPSED = torch.tensor([1.0] * 6 + [0.0] * 10).expand(64, 16)  # all tokens to the first 3 of 8 devices
LIMIT = {"name": "group_limit", "num_groups": 8, "keep": 3}


@pytest.mark.parametrize("masks", [[], [LIMIT]], ids=["free", "limited"])
def test_a_limit_by_token_leaves_the_budget_as_the_router_collapses(masks: list[Any]) -> None:
    """k T / D = 48; of the 128 that each device is offered."""
    router = make_router(
        16, "deepseek_v2", masks=masks, capacity={"name": "device", "devices": 8, "factor": 1.0, "spare": 0.0}
    )
    routing = route_scores(router, COLLAPSED)
    assert torch.bincount(routing.wanted.expert_N // 2, minlength=8).tolist() == [128] * 3 + [0] * 5
    assert torch.bincount(routing.pairs.expert_N // 2, minlength=8).tolist() == [48] * 3 + [0] * 5


def test_a_mask_of_the_whole_step_leaves_fewer_devices() -> None:
    """Tokens stay on one of four ranks, with two of eight devices: k T / 2."""
    router = make_router(
        16,
        masks=[{"name": "gating_dropout", "ranks": 4, "rate": 1.0}, {**LIMIT, "keep": 1}],
        selector={"k": 2},
        capacity={"name": "device", "devices": 8, "factor": 1.0, "spare": 0.0},
    )
    routing = route_scores(router, COLLAPSED, make_context(micro_batch=0))
    assert torch.bincount(routing.wanted.expert_N // 2, minlength=8).tolist()[2:] == [0] * 6
    assert cast(Any, router.capacity).budget(64, routing.open_E) == 64
    assert routing.counts_E().view(8, 2).sum(1).max() == 64


def test_affinities_that_round_to_1_are_ordered_by_the_scores() -> None:
    """Device 0 has one place for three pairs; by equal p it would be the first token's."""
    capacity = {"name": "device", "devices": 2, "factor": 0.5, "spare": 0.0}
    router = make_router(2, score_function="sigmoid", selector={"k": 1, "weights": "raw"}, capacity=capacity)
    routing = route_scores(router, torch.tensor([[18.0, 0.0], [20.0, 0.0], [19.0, 0.0]]))
    assert routing.pairs.token_N.tolist() == [1]
