"""`balanced`: the best even assignment in training, greedy in evaluation, for any order of the tokens."""

import torch

from tests.support.moe.build import make_context, make_scored, select

# All like expert 0 best; tokens 0 and 3 lose most by leaving it.
SCORES = torch.tensor([[3.0, 0.0], [2.0, 1.5], [2.0, 1.9], [5.0, 1.0]])


def test_by_hand() -> None:
    pairs = select("balanced", make_scored(SCORES, SCORES.sigmoid()))
    assert pairs.token_N.tolist() == [0, 1, 2, 3]
    assert pairs.expert_N.tolist() == [0, 1, 1, 0]
    assert pairs.choice_N.tolist() == [0, 0, 0, 0]
    expected_N = 1 / (1 + (-torch.tensor([3.0, 1.5, 1.9, 5.0])).exp())
    torch.testing.assert_close(pairs.weight_N, expected_N)


def test_evaluation_is_greedy() -> None:
    pairs = select("balanced", make_scored(SCORES, SCORES.sigmoid()), evaluate=True)
    assert pairs.expert_N.tolist() == [0, 0, 0, 0]
    torch.testing.assert_close(pairs.weight_N, SCORES[:, 0].sigmoid())


def test_tokens_keep_their_experts_in_any_order_of_the_batch() -> None:
    """Many are alike, so that ties decide: by the place in the data, not in the batch."""
    scores_TE = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).repeat(8, 1)
    in_order = make_context(token_index_T=torch.arange(24))
    straight = select("balanced", make_scored(scores_TE), in_order).expert_N
    order_T = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    out_of_order = make_context(token_index_T=order_T)
    shuffled = select("balanced", make_scored(scores_TE[order_T]), out_of_order).expert_N
    assert torch.equal(shuffled, straight[order_T])
    assert torch.bincount(straight).tolist() == [6, 6, 6, 6]
