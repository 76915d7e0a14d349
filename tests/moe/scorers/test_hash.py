"""The hash scorer: fixed tables, drawn at random or balanced by frequency, and how the layer follows them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.moe.part import StepContext
from megamoe.moe.validation import check_parts
from tests.support.moe.build import make_context, make_hidden, make_part, moe_config

ROUTER = {"scorer": "hash", "selector": "table"}


def make_hash(
    num_experts: int = 4,
    vocab_size: int | None = 1000,
    tables: int = 1,
    layer: int = 1,
    seed: int = 0,
    **options: Any,
) -> Any:
    dims = {"vocab_size": vocab_size, "num_choices": tables, "seed": seed}
    return make_part("scorer", "hash", num_experts, layer, dims, **options)


def save_counts(folder: Path, counts: Any) -> str:
    np.save(folder / "x.counts.npy", np.array(counts))
    return str(folder / "x.counts.npy")


def loads_of(table_V: Tensor, counts: Any, num_experts: int) -> list[int]:
    """The tokens of each expert, in ascending order."""
    loads = [0] * num_experts
    for expert, count in zip(table_V.tolist(), counts, strict=False):
        loads[expert] += count
    return sorted(loads)


def test_a_tokens_expert_depends_on_its_id_alone() -> None:
    scorer = make_hash(num_experts=3, vocab_size=4, tables=2)
    scorer.table_KV.copy_(torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]]))
    context = make_context(token_ids_T=torch.tensor([3, 1, 0, 3]))
    scores_TE, extras = scorer(make_hidden(4), context)
    assert extras["table_TK"].tolist() == [[0, 1], [1, 1], [0, 2], [0, 1]]
    assert scores_TE.tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1], [1, 1, 0]]
    assert scores_TE.dtype == torch.float32 and extras["table_TK"].dtype == torch.int64
    assert torch.equal(scorer.eval()(make_hidden(4, seed=7), context)[0], scores_TE)


def test_random_tables_fill_all_experts_and_do_not_follow_each_other() -> None:
    table_KV = make_hash(num_experts=6, vocab_size=36_000, tables=2).table_KV
    assert table_KV.shape == (2, 36_000)
    pairs = torch.bincount(table_KV[0] * 6 + table_KV[1], minlength=36)  # each about 1000, sigma 31
    assert len(pairs) == 36 and (pairs - 1000).abs().max() < 160


def test_a_wider_embedding_changes_no_ids_expert() -> None:
    """Padding the vocabulary is no other hash."""
    assert torch.equal(make_hash(vocab_size=1024).table_KV[:, :1000], make_hash(vocab_size=1000).table_KV)


def test_frequency_by_hand(tmp_path: Path) -> None:
    """9 | 8; 7 to the 8: 9 | 15; 5 to the 9: 14 | 15; 4: 18 | 15; 1: 18 | 16."""
    counts = [1, 9, 0, 7, 5, 8, 0, 4]
    table_V = make_hash(2, 8, balance="frequency", counts=save_counts(tmp_path, counts)).table_KV[0]
    groups = {frozenset(word for word in (0, 1, 3, 4, 5, 7) if table_V[word] == expert) for expert in (0, 1)}
    assert groups == {frozenset({1, 4, 7}), frozenset({5, 3, 0})}
    assert table_V[2] != table_V[6]  # ids that never occur are dealt out in turn


def naive_loads(counts: list[int], num_experts: int) -> list[int]:
    loads = [0] * num_experts
    for count in sorted(counts, reverse=True):
        loads[loads.index(min(loads))] += count
    return sorted(loads)


def test_frequency_is_the_plain_greedy_rule(tmp_path: Path) -> None:
    counts = [10_000 // (rank + 1) for rank in np.random.default_rng(0).permutation(300)]
    counts[17] = counts[201] = 0
    path = save_counts(tmp_path, counts)
    table_KV = make_hash(8, 320, 2, balance="frequency", counts=path).table_KV
    assert loads_of(table_KV[0], counts, 8) == naive_loads(counts, 8)
    random_loads = loads_of(make_hash(8, 320).table_KV[0], counts, 8)
    assert random_loads[-1] > 1.3 * loads_of(table_KV[0], counts, 8)[-1]
    unseen = [17, 201, *range(300, 320)]
    assert sorted(torch.bincount(table_KV[0, unseen], minlength=8).tolist()) == [2, 2, 3, 3, 3, 3, 3, 3]


def test_frequency_tables_group_the_ids_differently_and_stay_balanced(tmp_path: Path) -> None:
    counts = list(range(2000, 1000, -1))  # all distinct: the greedy rule has one answer
    path = save_counts(tmp_path, counts)
    table_KV = make_hash(4, 1000, 3, balance="frequency", counts=path).table_KV
    for first, second in ((0, 1), (0, 2), (1, 2)):
        pairs = torch.bincount(table_KV[first] * 4 + table_KV[second], minlength=16)
        assert (pairs - 62.5).abs().max() < 40  # relabelled, 4 of the 16 would hold 250
    for table_V in table_KV:
        loads = loads_of(table_V, counts, 4)
        assert loads[-1] - loads[0] < 2000
    again = make_hash(4, 1000, 3, balance="frequency", counts=path)
    assert torch.equal(again.table_KV, table_KV)
    assert not torch.equal(make_hash(4, 1000, 3, 2, balance="frequency", counts=path).table_KV, table_KV)


def test_only_sizes_on_the_meta_device() -> None:
    with torch.device("meta"):
        assert make_hash(tables=2).table_KV.is_meta
        scorer = make_hash(vocab_size=None, balance="frequency", counts="nowhere.npy")
    assert list(scorer.parameters()) == [] and scorer.table_KV.is_meta


def test_without_token_ids_it_is_refused() -> None:
    with pytest.raises(UserError, match="hash needs token ids.*knows no vocabulary"):
        make_hash(vocab_size=None)
    with pytest.raises(UserError, match="hash needs token ids.*got none"):
        make_hash()(make_hidden(3), StepContext())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read \\(No such file or directory\\)"),
        (b"", "cannot be read \\(no .npy of numbers\\)"),
        (b"1 2 3\n", "cannot be read \\(no .npy of numbers\\)"),
        (np.array([{}]), "cannot be read \\(no .npy of numbers\\)"),
        (np.zeros((2, 3), dtype=np.int64), "is not int64 \\[vocabulary\\]"),
        (np.zeros(3), "is not int64 \\[vocabulary\\]"),
    ],
)
def test_broken_counts_are_refused_before_building(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "x.counts.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    scorer = {"name": "hash", "balance": "frequency", "counts": str(path)}
    expected = f"counts '{path}' {message}; give the PREFIX.counts.npy"
    with pytest.raises(UserError, match=f"^moe.router.scorer: hash: {expected}") as caught:
        check_parts(moe_config(router={**ROUTER, "scorer": scorer}), 1)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=expected):
        make_hash(balance="frequency", counts=str(path))


def test_counts_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    for counts in ([1] * 9, [1, -1]):
        path = save_counts(tmp_path, counts)
        with pytest.raises(UserError, match=f"{len(counts)} ids; expected at most the embedding's 8 rows"):
            make_hash(vocab_size=8, balance="frequency", counts=path)
