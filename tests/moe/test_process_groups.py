"""A micro batch spread over ranks: whose rows are whose, and what of a decision concerns a rank."""

import torch

from megamoe.moe.part import StepContext
from megamoe.moe.process_groups import ParallelGroups, rank_in, size_of
from megamoe.moe.routing import Routing, has_row_per_token
from megamoe.moe.token_sharding import TokenSharding
from tests.support.moe.build import gradient_of, make_context, make_pairs, make_routing


def spread_of(size: int, rank: int) -> TokenSharding:
    """Return the spread of one of several ranks, without a group, for functions that do not communicate."""
    spread = TokenSharding(None)
    spread.size, spread.rank = size, rank
    return spread


def six_tokens() -> Routing:
    """Scores that tell their token; of token 3's two wanted pairs one is computed, of token 5's none."""
    scores_TE = torch.arange(6.0)[:, None] + torch.tensor([0.0, 0.25, 0.5])
    routing = make_routing([[0, 1], [2], [1, 0], [2, 1], [0], [1]], scores_TE, scores_TE.softmax(-1))
    routing.pairs = routing.wanted.keep(torch.tensor([1, 1, 1, 1, 1, 0, 1, 1, 0]).bool())
    routing.candidates_TE = torch.arange(18).view(6, 3) % 4 > 0
    routing.extras = {"clean_TE": -scores_TE, "first_T": torch.arange(6), "phase_1": torch.ones(1)}
    return routing


def test_of_tokens_by_hand() -> None:
    routing = six_tokens()
    own = routing.of_tokens(2, 3)
    assert own.num_tokens == 3
    assert own.wanted.token_N.tolist() == [0, 0, 1, 1, 2]
    assert own.wanted.expert_N.tolist() == [1, 0, 2, 1, 0]
    assert own.wanted.choice_N.tolist() == [0, 1, 0, 1, 0]
    assert own.pairs.token_N.tolist() == [0, 0, 1, 2]
    assert own.pairs.expert_N.tolist() == [1, 0, 1, 0]
    assert own.wanted_counts_E().tolist() == [2, 2, 1]
    assert own.counts_E().tolist() == [2, 2, 0]
    for name in ("scores_TE", "affinities_TE", "probs_TE", "ranking_TE", "candidates_TE"):
        assert torch.equal(getattr(own, name), getattr(routing, name)[2:5]), name
    assert torch.equal(own.extras["clean_TE"], routing.extras["clean_TE"][2:5])
    assert own.extras["first_T"].tolist() == [2, 3, 4]
    assert own.extras["phase_1"].tolist() == [1]
    assert six_tokens().of_tokens(5, 1).pairs.token_N.tolist() == []


def test_of_tokens_without_candidates_and_the_gradient_of_the_weights() -> None:
    routing = six_tokens()
    routing.candidates_TE, routing.is_local = None, True
    routing.pairs = make_pairs([[0], [1], [2], [0], [1], [2]], [[float(token)] for token in range(6)])
    routing.pairs.weight_N.requires_grad_()
    own = routing.of_tokens(1, 2)
    assert own.candidates_TE is None and own.is_local
    (own.pairs.weight_N * torch.tensor([3.0, 5.0])).sum().backward()
    assert gradient_of(routing.pairs.weight_N).tolist() == [0, 3, 5, 0, 0, 0]


def test_the_ranks_parts_are_the_whole() -> None:
    routing = six_tokens()
    own = [spread_of(3, rank).local_shard(routing) for rank in range(3)]
    assert torch.equal(torch.stack([part.counts_E() for part in own]).sum(0), routing.counts_E())
    assert torch.equal(torch.cat([part.scores_TE for part in own]), routing.scores_TE)
    together_N = torch.cat([part.wanted.token_N + 2 * rank for rank, part in enumerate(own)])
    assert torch.equal(together_N, routing.wanted.token_N)


def test_a_single_rank_holds_everything() -> None:
    spread, routing, context = TokenSharding(None), six_tokens(), StepContext()
    assert spread.local_shard(routing) is routing
    assert spread.all_gather(routing.scores_TE) is routing.scores_TE
    assert spread.local_context(context, 6) is context
    assert size_of(None) == 1 and rank_in(None) == 0
    assert ParallelGroups().follows_data


def test_own_context() -> None:
    index_T, ids_T = torch.arange(100, 108), torch.arange(8) * 3
    context = make_context(seed=4, step=2, micro_batch=3, token_index_T=index_T, token_ids_T=ids_T)
    own = spread_of(4, 2).local_context(context, 2)
    assert own.batch.token_index_T is not None and own.token_ids_T is not None
    assert own.batch.token_index_T.tolist() == [104, 105]
    assert own.token_ids_T.tolist() == [12, 15]
    assert (own.seed, own.step, own.micro_batch) == (4, 2, 3)
    assert context.batch.token_index_T is index_T  # the context itself stays as it is
    unnumbered = spread_of(4, 3).local_context(StepContext(), 2)
    assert unnumbered.batch.token_index_T is not None and unnumbered.token_ids_T is None
    assert unnumbered.batch.token_index_T.tolist() == [6, 7]


def test_own_positions() -> None:
    cpu, context = torch.device("cpu"), make_context(position_T=torch.tensor([0, 3, 1, 4, 0, 5, 1, 6]))
    assert spread_of(4, 2).local_context(context, 2).position(2, cpu).tolist() == [0, 5]
    padded = make_context(sequence_T=torch.tensor([0, 1, 0, 1, 1]), bounds=(0, 3, 4, 5))
    assert spread_of(3, 1).local_context(padded, 1).sequence(1, cpu).tolist() == [1]
    two = make_context(sample_index_B=torch.tensor([7, 8]))  # two sequences, whose tokens are not numbered
    assert spread_of(4, 2).local_context(two, 2).position(2, cpu).tolist() == [2, 2]


def test_which_names_have_a_row_for_each_token() -> None:
    assert all(has_row_per_token(name) for name in ("clean_TE", "first_T", "sampling_scores_TE", "x_TKE"))
    assert not any(has_row_per_token(name) for name in ("phase_1", "load_E", "weight_ET", "T_E", "tokens"))
