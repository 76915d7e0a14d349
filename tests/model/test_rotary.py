"""The keys of rotary positions on every path of a model: our attention, Megatron-Core's, and the cache."""

import pytest
import torch

from megamoe.model import modules
from megamoe.model.attention.caches import KeyValueCache
from tests.model.test_gpt import POSITIONS, S, text
from tests.support.tiny import tiny, tiny_gpt


def test_the_base_of_rotary_positions_reaches_attention(one_rank: None) -> None:
    tokens, labels = text()
    bases = (tiny("model.init_std=0.5", f"model.rope_base={base}") for base in (10000, 50))
    found = [tiny_gpt(config)(tokens, POSITIONS, labels)[0, 1:] for config in bases]
    assert ((found[0] - found[1]).abs() > 1e-5).all()


def test_on_cuda_without_triton_megatron_core_applies_rotary_positions(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its operators and ours give the same losses."""
    tokens, labels = text()
    config = tiny("model.init_std=0.5", "model.rope_base=50", "model.gpu_kernels=plain")
    ours = tiny_gpt(config)
    monkeypatch.setattr(modules, "has_cuda", lambda: True)
    theirs = tiny_gpt(config)
    assert [gpt.model.position_embedding_type for gpt in (ours, theirs)] == ["none", "rope"]
    assert not theirs.model.config.apply_rope_fusion
    with_triton = tiny_gpt(tiny("model.gpu_kernels=triton"))
    assert with_triton.model.position_embedding_type == "none"
    found, expected = (gpt(tokens, POSITIONS, labels) for gpt in (theirs, ours))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


TURNS = {
    "share": "{share: 0.5}",
    "interleaved": "{interleaved: true}",
    "interleaved share, llama3": "{share: 0.5, interleaved: true, scaling: llama3, factor: 4, "
    "original_length: 16, low_frequency_factor: 1, high_frequency_factor: 4}",
    "yarn": "{scaling: yarn, factor: 8, original_length: 16}",
    "yarn share": "{share: 0.5, scaling: yarn, factor: 8, original_length: 16, attention_factor: 1.5}",
    "linear": "{scaling: linear, factor: 3}",
}


@pytest.mark.parametrize("case", TURNS)
def test_rotary_keys_where_megatron_core_turns_heads(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Its operators with our frequencies and factor give our losses, which are not the plain ones."""
    tokens, labels = text()
    sizes = ("model.init_std=0.5", "model.rope_base=50", "model.gpu_kernels=plain", "model.head_size=16")
    config = tiny(*sizes, f"model.rotary={TURNS[case]}")
    ours, plain = tiny_gpt(config), tiny_gpt(tiny(*sizes))
    monkeypatch.setattr(modules, "has_cuda", lambda: True)
    theirs = tiny_gpt(config)
    assert theirs.model.position_embedding_type == "rope" and not theirs.model.config.apply_rope_fusion
    found, expected, other = (gpt(tokens, POSITIONS, labels) for gpt in (theirs, ours, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (expected - other)[0, 1:].abs().max() > 1e-3


@pytest.mark.parametrize("case", TURNS)
def test_rotary_keys_in_generation(one_rank: None, case: str) -> None:
    """Token by token from a cache: the logits of the whole sequence."""
    tokens, _ = text()
    model = tiny_gpt(tiny("model.init_std=0.5", "model.head_size=16", f"model.rotary={TURNS[case]}")).eval()
    cache, found = KeyValueCache(torch.tensor([0]), S), []
    with torch.no_grad():
        for place in range(S):
            found.append(model.whole_logits(tokens[:, [place]], POSITIONS[:, [place]], cache))
            cache.advance(1)
        expected = model.whole_logits(tokens, POSITIONS)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-5)
