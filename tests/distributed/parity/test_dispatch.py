"""The exchanges against a plain loop over tokens: outputs and every gradient, bit of load by bit."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.config import PartChoice
from megamoe.kernels.choice import DEFAULT_KERNELS
from megamoe.moe.dispatch.choice import build_dispatcher
from megamoe.moe.dispatch.direct import DirectDispatch
from megamoe.moe.dispatch.dispatcher import DispatchConfig, Dispatcher, LocalDispatch
from megamoe.moe.experts.activations import activate
from megamoe.moe.experts.grouped import GroupedExperts, Slice
from megamoe.moe.process_groups import ParallelGroups
from megamoe.moe.routing import Pairs, Routing
from megamoe.parallel import launch
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import groups_of, start_groups
from tests.support.moe.build import make_scored
from tests.support.ranks.pool import Pool

HIDDEN, FFN, EXPERTS = 16, 32, 8
WHOLE = Slice()
SEED = 5


@dataclass(frozen=True)
class Case:
    """tokens: of rank 0, rank 1, ... in turn. k: experts a token. keep: the share of pairs that survive."""

    tokens: tuple[int, ...] = (13, 7, 10, 5)
    k: int = 2
    to_one: bool = False  # all pairs of all ranks go to expert 5
    keep: float = 1.0
    dtype: torch.dtype = torch.float32


CASES = {
    "top-1": Case(k=1),
    "top-2": Case(),
    "top-8": Case(k=8),
    "all to one expert": Case(k=1, to_one=True),
    "a rank without tokens": Case(tokens=(0, 9, 6, 0)),
    "no rank has tokens": Case(tokens=(0, 0, 0, 0)),
    "dropped pairs": Case(k=4, keep=0.4),
    "all of it dropped": Case(keep=0.0),
    "bf16": Case(dtype=torch.bfloat16),
}
AT_HOME = ("top-2", "a rank without tokens", "dropped pairs")


@dataclass
class Problem:
    """The inputs of one rank, as leaves that take gradients."""

    hidden_TH: Tensor
    router_EH: Tensor
    upstream_TH: Tensor
    case: Case
    rank: int

    def routing(self) -> Routing:
        """Softmax top-k on a product with the router's weight; a loop over nothing but choices."""
        scores_TE = self.hidden_TH.float() @ self.router_EH.T
        probs_TE = scores_TE.softmax(-1)
        if self.case.to_one:
            expert_TK = torch.full((len(scores_TE), 1), 5)
        else:
            expert_TK = probs_TE.detach().topk(self.case.k).indices
        wanted = Pairs.of_choices(expert_TK, probs_TE.gather(1, expert_TK))
        generator = torch.Generator().manual_seed(100 + self.rank)
        keep_N = torch.rand(wanted.token_N.numel(), generator=generator) < self.case.keep
        scored = make_scored(scores_TE, probs_TE)
        return Routing(**vars(scored), wanted=wanted, pairs=wanted.keep(keep_N))


def make_problem(case: Case, rank: int) -> Problem:
    generator = torch.Generator().manual_seed(SEED + rank)
    tokens = case.tokens[rank]
    hidden_TH = torch.randn(tokens, HIDDEN, generator=generator).to(case.dtype).requires_grad_()
    upstream_TH = torch.randn(tokens, HIDDEN, generator=generator).to(case.dtype)
    router_EH = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(SEED))
    return Problem(hidden_TH, router_EH.requires_grad_(), upstream_TH, case, rank)


def make_experts(expert_ids: range, dtype: torch.dtype, cut: Slice = WHOLE) -> GroupedExperts:
    experts = GroupedExperts(
        HIDDEN, FFN, expert_ids, activation="swiglu", std=0.3, output_std=0.3, seed=SEED, layer=1, cut=cut
    )
    return experts.to(dtype)


def held_by(layout: Layout, rank: int) -> tuple[range, Slice]:
    """Return the rank's experts and its slice of them."""
    size = EXPERTS // layout.expert
    first = layout.expert_rank(rank) * size
    return range(first, first + size), Slice(rank % layout.expert_tensor, layout.expert_tensor)


def own_experts(layout: Layout, rank: int, case: Case) -> GroupedExperts:
    expert_ids, cut = held_by(layout, rank)
    return make_experts(expert_ids, case.dtype, cut)


def exchange_all(layout: Layout) -> dict[str, dict[str, Tensor]]:
    """Job: this rank's part of every case through the layout's dispatch."""
    world, dispatcher = start(layout)
    found = {}
    for name, case in CASES.items():
        problem = make_problem(case, world.rank)
        experts = own_experts(layout, world.rank, case)
        found[name] = through(dispatcher, experts, problem)
    return found


def start(layout: Layout) -> tuple[launch.World, Dispatcher]:
    world = launch.find_world()
    launch.start(world, timeout_minutes=1)
    groups: ParallelGroups = start_groups(layout, timeout_minutes=1).layer
    return world, build_dispatcher(PartChoice.default("exchange"), DispatchConfig(EXPERTS, groups))


def stay_home(layout: Layout) -> dict[str, list[dict[str, Tensor]]]:
    """Job: every token chooses among its own rank's experts; dispatch with and without `is_local`."""
    world, dispatcher = start(layout)
    groups = groups_of(layout).layer
    size = EXPERTS // layout.expert
    calls, real = [], dist.all_to_all_single

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["group"])
        return real(*args, **kwargs)

    dist.all_to_all_single = counted
    found: dict[str, list[dict[str, Tensor]]] = {name: [] for name in AT_HOME}
    for name, tell in product(AT_HOME, (True, False)):
        calls.clear()
        problem = make_problem(CASES[name], world.rank)
        experts = own_experts(layout, world.rank, problem.case)
        routing = home_routing(problem, layout.expert_rank(world.rank), size)
        routing.is_local = tell
        rows, counts_E, plan = dispatcher.dispatch(problem.hidden_TH, routing)
        output_TH = dispatcher.combine(experts(rows, counts_E), plan)
        output_TH.backward(problem.upstream_TH)
        sliced = calls.count(groups.expert_tensor)
        result = {"output": output_TH.detach(), "calls": torch.tensor([len(calls) - sliced, sliced])}
        found[name].append({**result, **gradients(experts, problem)})
    return found


def home_routing(problem: Problem, rank: int, size: int) -> Routing:
    """The problem's routing with each pair's expert replaced by one of `rank`."""
    routing = problem.routing()
    routing.pairs.expert_N = rank * size + routing.pairs.expert_N % size
    return routing


def stray(case: Case) -> str:
    """Job: return the error if `is_local` is set and a pair's expert is on another rank."""
    world = launch.find_world()
    launch.start(world, timeout_minutes=1)
    problem = make_problem(case, world.rank)
    routing = problem.routing()
    routing.is_local = True
    places = DispatchConfig(EXPERTS, ParallelGroups(expert=dist.group.WORLD))
    try:
        DirectDispatch(None, places).dispatch(problem.hidden_TH, routing)
    except RuntimeError as error:
        return str(error)
    return ""


def through(dispatcher: Dispatcher, experts: GroupedExperts, problem: Problem) -> dict:
    """Dispatch, experts, combine, and back. along: the number of each row's token over all ranks."""
    routing = problem.routing()
    rows, counts_E, plan = dispatcher.dispatch(problem.hidden_TH, routing)
    along = dispatcher.dispatch_values(routing.pairs.token_N + 100 * problem.rank, plan)
    output_TH = dispatcher.combine(experts(rows, counts_E), plan)
    output_TH.backward(problem.upstream_TH)
    result = {"output": output_TH.detach(), "rows": rows.detach(), "along": along, "counts": counts_E}
    return {**result, **gradients(experts, problem)}


def loop(case: Case, ranks: int) -> dict[str, Any]:
    """The oracle: token by token, pair by pair, with all experts here; fp32.

    up, down: the gradient, a tensor; of the others a tensor for each rank.
    """
    experts = make_experts(range(EXPERTS), case.dtype).float()
    outputs, problems = [], [make_problem(case, rank) for rank in range(ranks)]
    for problem in problems:
        pairs = problem.routing().pairs
        rows = [torch.zeros(HIDDEN) for _ in range(case.tokens[problem.rank])]
        for token, expert, weight in zip(pairs.token_N, pairs.expert_N, pairs.weight_N, strict=True):
            inner = activate(experts.up[expert] @ problem.hidden_TH[token].float(), "swiglu", DEFAULT_KERNELS)
            rows[token] = rows[token] + weight * (experts.down[expert] @ inner)
        output_TH = torch.stack(rows) if rows else torch.zeros(0, HIDDEN)
        if output_TH.requires_grad:
            output_TH.backward(problem.upstream_TH.float())
        outputs.append(output_TH.detach())
    found = [gradients(experts, problem) for problem in problems]
    return {
        "output": outputs,
        "hidden": [one["hidden"] for one in found],
        "router": [one["router"] for one in found],
        "up": found[0]["up"],
        "down": found[0]["down"],
    }


def gradients(experts: GroupedExperts, problem: Problem) -> dict[str, Tensor]:
    leaves = {
        "hidden": problem.hidden_TH,
        "router": problem.router_EH,
        "up": experts.up,
        "down": experts.down,
    }
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}


def assert_close(ours: Tensor, expected: Tensor, case: Case) -> None:
    tolerance = 1e-5 if case.dtype == torch.float32 else 2e-2
    assert ours.shape == expected.shape
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(ours.float(), expected.float(), rtol=0, atol=tolerance * max(scale, 1e-3))


LAYOUTS = {
    "EP 2": Layout(2, expert=2),
    "EP 4": Layout(4, expert=4),
    "ETP 2": Layout(2, expert_tensor=2),
    "EP 2, ETP 2": Layout(4, expert=2, expert_tensor=2),
    "ETP 4": Layout(4, expert_tensor=4),
    "2 nodes of 1": Layout(2, expert=2, nodes=2),
    "2 nodes of 2": Layout(4, expert=4, nodes=2),
    "4 nodes of 1": Layout(4, expert=4, nodes=4),
    "2 nodes of 1, ETP 2": Layout(4, expert=2, expert_tensor=2, nodes=2),
}


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=list(LAYOUTS))
def exchanged(request: pytest.FixtureRequest, pool: Pool) -> tuple[Layout, list[dict[str, Any]]]:
    return request.param, pool.run(exchange_all, request.param, ranks=request.param.ranks)


@pytest.mark.parametrize("name", CASES)
def test_the_exchange_equals_the_loop(exchanged: tuple[Layout, list[dict[str, Any]]], name: str) -> None:
    layout, all_found = exchanged
    case, found = CASES[name], [rank[name] for rank in all_found]
    expected = loop(case, layout.ranks)
    for rank in range(layout.ranks):
        for leaf in ("output", "hidden", "router"):
            assert_close(found[rank][leaf], expected[leaf][rank], case)
        assert found[rank]["output"].dtype == case.dtype
        expert_ids, cut = held_by(layout, rank)
        here_F = range(cut.index * FFN // cut.count, (cut.index + 1) * FFN // cut.count)
        score_function_and_value = [*here_F, *(FFN + place for place in here_F)]
        assert_close(found[rank]["up"], expected["up"][expert_ids][:, score_function_and_value], case)
        assert_close(found[rank]["down"], expected["down"][expert_ids][:, :, list(here_F)], case)
    if case.to_one:  # expert 5 lives on the ranks of its slices; the others receive nothing
        for rank in range(layout.ranks):
            rows = sum(case.tokens[: layout.ranks]) if 5 in held_by(layout, rank)[0] else 0
            assert len(found[rank]["rows"]) == rows


@pytest.mark.parametrize("name", CASES)
def test_extra_columns_arrive_with_their_rows(exchanged: Any, name: str) -> None:
    layout, all_found = exchanged
    hidden = [make_problem(CASES[name], rank).hidden_TH.detach() for rank in range(layout.ranks)]
    for found in (rank[name] for rank in all_found):
        assert int(found["counts"].sum()) == len(found["rows"]) == len(found["along"])
        for row_H, number in zip(found["rows"], found["along"].tolist(), strict=True):
            assert torch.equal(row_H, hidden[number // 100][number % 100])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_local_one_equals_the_loop(case: Case) -> None:
    expected = loop(case, ranks=1)
    found = through(LocalDispatch(), make_experts(range(EXPERTS), case.dtype), make_problem(case, 0))
    for name in ("output", "hidden", "router"):
        assert_close(found[name], expected[name][0], case)
    for name in ("up", "down"):
        assert_close(found[name], expected[name], case)


@pytest.mark.parametrize("layout", ["EP 2", "EP 2, ETP 2", "2 nodes of 1", "2 nodes of 2"])
def test_a_local_routing_equals_the_all_to_all(pool: Pool, layout: str) -> None:
    sizes = LAYOUTS[layout]
    sliced = 4 if sizes.expert_tensor > 1 else 0  # rows to the slices and back, forwards and backwards
    # Sizes, and the rows as among the slices. By node also the pairs' experts and weights, with gradient.
    inside = 5 if sizes.expert > sizes.nodes else 0
    between = 8 if sizes.nodes > 1 else 0
    for of_rank in pool.run(stay_home, sizes, ranks=sizes.ranks):
        for name, (home, away) in of_rank.items():
            assert home.pop("calls").tolist() == [0, sliced], name
            assert away.pop("calls").tolist() == [inside + between, sliced], name
            for leaf, value in home.items():
                if sizes.nodes > 1:  # whose sums have another order
                    torch.testing.assert_close(value, away[leaf], rtol=1e-5, atol=1e-6)
                else:
                    assert torch.equal(value, away[leaf]), f"{name}: {leaf}"


def test_a_pair_on_another_rank_is_an_error(pool: Pool) -> None:
    for message in pool.run(stray, CASES["top-2"], ranks=2):
        assert "is_local, but a pair's expert is on another rank" in message
