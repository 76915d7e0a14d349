"""table: the pairs are the scorer's table, each of weight 1."""

import torch

from megamoe.moe.part import Dims, StepContext
from megamoe.moe.router import Router
from tests.support.moe.build import HIDDEN, make_context, make_hidden, make_part, make_scored, moe_config

TABLE = torch.tensor([[2, 0], [1, 1], [3, 2]])


def test_pairs_by_hand() -> None:
    """The second token's tables agree: it has that expert twice."""
    selector = make_part("selector", "table", k=2)
    assert selector.num_choices == 2
    pairs = selector(make_scored(torch.zeros(3, 4), table_TK=TABLE), StepContext())
    assert pairs.token_N.tolist() == [0, 0, 1, 1, 2, 2]
    assert pairs.expert_N.tolist() == [2, 0, 1, 1, 3, 2]
    assert pairs.choice_N.tolist() == [0, 1, 0, 1, 0, 1]
    assert pairs.weight_N.tolist() == [1.0] * 6 and pairs.weight_N.dtype == torch.float32


def test_a_router_has_as_many_tables_as_choices() -> None:
    config = moe_config(num_experts=5, router={"scorer": "hash", "selector": {"name": "table", "k": 3}})
    router = Router(config.router, Dims(HIDDEN, 5, vocab_size=50))
    assert router.scorer.table_KV.shape == (3, 50)
    ids_T = torch.tensor([7, 49, 7])
    pairs = router(make_hidden(3), make_context(token_ids_T=ids_T)).pairs
    table_KV = router.get_buffer("scorer.table_KV")
    assert pairs.expert_N.tolist() == table_KV[:, ids_T].T.flatten().tolist()
