"""The estimate of the bytes that the backward pass needs, by hand."""

from types import SimpleNamespace
from typing import cast

import pytest

from megamoe.apps.plan.activations import activation_bytes
from megamoe.data.vocabulary import Vocabulary
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.train.step import num_rollouts
from tests.support.tiny import VOCABULARY, tiny, tiny_gpt

WORDS = cast(Vocabulary, SimpleNamespace(size=VOCABULARY))

# Of a token, in numbers: hidden 16, two blocks of attention, dense FFN 24, experts 12, vocabulary 48.
ATTENTION = 2 * 14 * 16
DENSE = 4 * 24
EXPERT = 4 * 12 + 3 * 16
LOGITS = 12 * 48  # bytes
TOKENS = 2 * 8  # micro batch x sequence
POLICY = "moe.router={scorer: policy, selector: {name: sample, k: 2}}"
EXPERT_CHOICE = "moe.router.selector={name: expert_choice, k: 3, allow_non_causal: true}"
ACTIVATIONS: dict[str, tuple[tuple[str, ...], float]] = {
    "dense": (("moe.layers=none",), TOKENS * (4 * (ATTENTION + 2 * DENSE) + LOGITS)),
    "without score functions": (
        ("model.activation=gelu", "moe.layers={at: [2]}"),
        TOKENS * (4 * (ATTENTION + 2 * 24 + 2 * (2 * 12 + 3 * 16)) + LOGITS),
    ),
    "two choices": ((), TOKENS * (4 * (ATTENTION + 2 * 2 * EXPERT) + LOGITS)),
    "an inserted layer": (
        ("moe.layers={insert_after: [1]}", "moe.num_shared_experts=1"),
        TOKENS * (4 * (ATTENTION + 2 * DENSE + 3 * EXPERT) + LOGITS),
    ),
    "sub-layers": (
        ("moe.layers={at: [2]}", "moe.expert_sublayers=3"),
        TOKENS * (4 * (ATTENTION + DENSE + 2 * 3 * EXPERT) + LOGITS),
    ),
    "latent experts": (
        ("moe.latent_size=8", "moe.num_shared_experts=1"),
        TOKENS * (4 * (ATTENTION + 2 * (2 * (4 * 12 + 3 * 8) + 2 * 8 + EXPERT)) + LOGITS),
    ),
    "experts that choose": ((EXPERT_CHOICE,), TOKENS * (4 * (ATTENTION + 2 * 3 * EXPERT) + LOGITS)),
    "rollouts": (
        (POLICY, "moe.losses={grpo: {rollouts: 5}}"),
        5 * TOKENS * (4 * (ATTENTION + 2 * 2 * EXPERT) + LOGITS),
    ),
    "recomputed MoE layers": (("model.recompute=selective",), TOKENS * (4 * ATTENTION + LOGITS)),
    "recomputed blocks": (
        ("model.recompute=full",),
        TOKENS * (4 * (2 * 16 + (ATTENTION + 2 * 2 * EXPERT) / 2) + LOGITS),
    ),
}


@pytest.mark.parametrize(("overrides", "expected"), ACTIVATIONS.values(), ids=ACTIVATIONS.keys())
def test_activation_bytes_by_hand(one_rank: None, overrides: tuple[str, ...], expected: float) -> None:
    config = tiny(*overrides)
    rollouts = num_rollouts(tiny_gpt(config))
    assert activation_bytes(config, WORDS.size, resolve_parallel(config, 1), rollouts) == expected


def test_activations_of_a_bf16_model_take_half_but_its_logits_do_not(one_rank: None) -> None:
    config = tiny("parallel.precision=bf16")
    expected = TOKENS * (2 * (ATTENTION + 2 * 2 * EXPERT) + LOGITS)
    assert activation_bytes(config, WORDS.size, resolve_parallel(config, 1), rollouts=1) == expected
