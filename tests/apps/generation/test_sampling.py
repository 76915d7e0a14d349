"""Sampling by hand, its draws against their probabilities; the experts' lines."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.apps.generation.experts import ExpertRecord, Experts, lines_of_experts
from megamoe.apps.generation.sampling import Sampling, finite_norms
from megamoe.errors import UserError
from megamoe.moe.routing import Pairs

LOGITS = torch.tensor([[0.1, 0.4, 0.2, 0.3], [1.0, 1.0, 1.0, 1.0]]).log()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.7}, [0, 4 / 7, 0, 3 / 7]),  # 0.4 + 0.3 reach it
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),  # of 0.9: 4/9 is not enough
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),  # squares
    ],
)
def test_probabilities_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    if options == {"top_p": 0.7}:
        options = {"top_p": 0.7 - 1e-7}  # the sum is 0.7 but for fp32's rounding
    found = Sampling(**options).probabilities(LOGITS)[0].tolist()
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_no_choice(value: float) -> None:
    """Without the check, token 0 would be generated again and again."""
    finite_norms(LOGITS.index_fill(1, torch.tensor([1]), -math.inf))
    with pytest.raises(UserError, match="logits are not finite; generate with --precision fp32"):
        finite_norms(LOGITS.index_fill(1, torch.tensor([1]), value))


def test_draws_follow_the_probabilities() -> None:
    sampling = Sampling(top_k=3)
    keys = [sampling.key_of([1, 2], number) for number in range(1000)]
    drawn = sampling.choose(LOGITS[:1].expand(1000, 4), keys, 0)
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    # Four standard deviations of a share of 1000 draws are at most 0.063.
    assert shares.tolist() == pytest.approx([0, 4 / 9, 2 / 9, 3 / 9], abs=0.063)
    assert shares[0] == 0


def test_draws_are_of_the_seed_the_prompt_and_its_occurrence() -> None:
    keys = {Sampling(seed=seed).key_of(tokens, n) for seed in (1, 2) for tokens in ([1], [2]) for n in (0, 1)}
    assert len(keys) == 8
    sampling = Sampling()
    alone = [sampling.choose(LOGITS[1:], [7], place) for place in range(50)]
    beside = [sampling.choose(LOGITS, [8, 7], place)[1:] for place in range(50)]
    assert alone == beside and len({token for (token,) in alone}) > 1


def test_no_temperature_takes_the_largest() -> None:
    assert Sampling(temperature=0.0).choose(LOGITS, [1, 2], 0) == [1, 0]


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"top_p": 0.0}, "--top-p: found 0, expected above 0 and at most 1"),
        ({"top_k": 0}, "--top-k: found 0, "),
        ({"temperature": -1.0}, "--temperature: found -1, "),
        ({"max_tokens": 0}, "--max-tokens: found 0, "),
        ({"stop": ("",)}, "--stop: found an empty text"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], start: str) -> None:
    with pytest.raises(UserError) as caught:
        Sampling(**options)
    assert str(caught.value).startswith(start)


def test_experts_as_lines() -> None:
    texts = ["<b>", "\n"]
    experts: list[Experts] = [{"2": [(3, 0.75), (5, 0.25)]}, {"2": []}]
    assert list(lines_of_experts(texts, experts)) == [
        "'<b>'  layer 2: 3 (0.75) 5 (0.25)",
        " '\\n'  layer 2: none",
    ]


def test_places_that_stay_empty_belong_to_no_token() -> None:
    """`capacity.pad` gives each expert as many rows; an empty one has the number after the last token."""
    record = ExpertRecord()
    token_N, expert_N = torch.tensor([[0, 2, 1, 2], [0, 0, 1, 1]])
    pairs = Pairs(token_N, expert_N, torch.tensor([0.5, 0.0, 0.25, 0.0]), torch.zeros_like(token_N))
    record._last = {"2": SimpleNamespace(pairs=pairs)}  # type: ignore[dict-item]
    record.take(torch.tensor([[0, 1]]))
    assert record.by_token[0] == {0: {"2": [(0, 0.5)]}, 1: {"2": [(1, 0.25)]}}
