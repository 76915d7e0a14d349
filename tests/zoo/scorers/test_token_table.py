"""token_table: the four tables, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megamoe.errors import UserError
from megamoe.moe.validation import check_parts
from tests.support.moe.build import make_context, make_hidden, make_layer, make_part, moe_config


def table_of(vocab_size: int = 1000, k: int = 2, num_experts: int = 6, **options: Any) -> torch.Tensor:
    dims = {"vocab_size": vocab_size, "num_choices": k}
    table_KV = make_part("scorer", "token_table", num_experts, dims=dims, **options).table_KV
    assert table_KV.shape == (k, vocab_size) and table_KV.dtype == torch.int64
    ordered_KV = table_KV.sort(dim=0).values
    assert (ordered_KV[1:] > ordered_KV[:-1]).all()  # an id's experts are distinct
    return table_KV.T


def test_round_robin_gives_every_expert_as_many_ids() -> None:
    table_VK = table_of(9, table="round_robin")
    first = table_VK[0, 0].item()
    assert table_VK.flatten().tolist() == [(first + i) % 6 for i in range(18)]


def test_hash_draws_evenly() -> None:
    load_E = torch.bincount(table_of(9000, k=3, table="hash").flatten(), minlength=6)
    assert (load_E - 4500).abs().max() < 4 * (9000 * 0.25) ** 0.5


def save(folder: Path, values: Any, dtype: Any = np.int64) -> str:
    np.save(folder / "table.npy", np.array(values, dtype=dtype))
    return str(folder / "table.npy")


def test_frequency_by_hand(tmp_path: Path) -> None:
    """Each id goes to the two experts with the fewest tokens; the two unseen ids follow in turns."""
    path = save(tmp_path, [50, 40, 30, 20, 0, 0])
    table_VK = table_of(6, num_experts=4, table="frequency", counts=path)
    assert table_VK.tolist() == [[0, 1], [2, 3], [2, 3], [0, 1], [0, 1], [2, 3]]


def test_a_file_is_taken_as_it_is_and_padding_goes_round(tmp_path: Path) -> None:
    path = save(tmp_path, [[3, 1], [0, 5]])
    assert table_of(4, table="file", path=path).tolist() == [[3, 1], [0, 5], [4, 5], [0, 1]]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([[0, 0]], "same expert twice"),
        ([[0, 8]], "beyond 0 to 7"),
        ([[0, 1, 2]], "3 experts of each id, but the selector's k is 2"),
        ([0, 1], "not int64"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, values: Any, words: str) -> None:
    router = {
        "scorer": {"name": "token_table", "table": "file", "path": save(tmp_path, values)},
        "selector": {"name": "table", "k": 2, "weights": "renormalised"},
    }
    with pytest.raises(UserError, match=words):
        check_parts(moe_config(num_experts=8, router=router), 1)


def test_the_table_chooses_and_the_scorer_weights() -> None:
    """Renormalised sqrt(softplus) of the two experts' scores, times the scale."""
    router = {
        "scorer": "token_table",
        "score_function": "sqrt_softplus",
        "selector": {"name": "table", "k": 2, "weights": "renormalised", "scale": 1.5},
    }
    layer = make_layer(moe_config(num_experts=8, router=router))
    ids_T, hidden_TH = torch.tensor([5, 9, 5]), make_hidden(3)
    pairs = layer.router(hidden_TH, make_context(token_ids_T=ids_T)).pairs
    expert_TK = layer.router.get_buffer("scorer.table_KV")[:, ids_T].T
    assert torch.equal(pairs.expert_N.view(3, 2), expert_TK)
    scores_TE = hidden_TH @ layer.router.get_parameter("scorer.weight").T
    p_TK = (1 + scores_TE.exp()).log().sqrt().gather(1, expert_TK)
    torch.testing.assert_close(pairs.weight_N.view(3, 2), 1.5 * p_TK / p_TK.sum(1, keepdim=True))
