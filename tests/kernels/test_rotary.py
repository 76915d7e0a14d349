"""Rotary positions against transformers': frequencies, factor, partial heads, interleaved pairs."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.kernels.attention.core import apply_rotary_with_documents
from megamoe.kernels.attention.documents import Documents
from megamoe.kernels.attention.rotary import (
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Scaling,
    YarnScaling,
    angles,
)
from tests.kernels.test_attention import each, make
from tests.support.kernels.chosen import apply_rotary, causal_attention, kernels
from tests.support.kernels.drawn import assert_close_to, draw

BASE, SIZE, LENGTH = 10000.0, 32, 40
YARN = YarnScaling(8.0, 64)
LLAMA3 = Llama3Scaling(8.0, 256, 1.0, 4.0)
# Ours, and what transformers' configuration calls the same.
SCALINGS: dict[str, tuple[Scaling, dict[str, Any]]] = {
    "linear": (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    "llama3": (
        LLAMA3,
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "yarn": (YARN, {"rope_type": "yarn", "factor": 8.0}),
    "yarn, DeepSeek-V2": (
        replace(YARN, mscale=0.707, mscale_all_dim=0.5),
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.707, "mscale_all_dim": 0.5},
    ),
    "yarn, one mscale": (replace(YARN, mscale=0.7), {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7}),
    "yarn, bounds": (
        replace(YARN, beta_fast=20.0, beta_slow=0.5, truncate=False),
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 20.0, "beta_slow": 0.5, "truncate": False},
    ),
    "yarn, equal bounds": (
        replace(YARN, beta_fast=1.0),
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 1.0, "beta_slow": 1.0},
    ),
    "yarn, factor given": (
        replace(YARN, attention_factor=1.3),
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3},
    ),
    "yarn, shorter": (replace(YARN, factor=0.5), {"rope_type": "yarn", "factor": 0.5}),
}
FORMS = {
    "share": Rotary(BASE, share=0.5),
    "interleaved": Rotary(BASE, interleaved=True),
    "interleaved share": Rotary(BASE, share=0.25, interleaved=True),
    "yarn": Rotary(BASE, scaling=YARN),
    "llama3 share": Rotary(BASE, share=0.5, scaling=LLAMA3),
}


def settings_of(parameters: dict[str, Any], share: float) -> Any:
    transformers = pytest.importorskip("transformers")
    length = {"linear": None, "llama3": 256, "yarn": 64}[parameters["rope_type"]]
    original = {} if length is None else {"original_max_position_embeddings": length}
    rope = {"rope_theta": BASE, "partial_rotary_factor": share, **original, **parameters}
    return transformers.LlamaConfig(
        hidden_size=4 * SIZE, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope
    )


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("name", SCALINGS)
def test_scalings(name: str, share: float) -> None:
    """The frequencies and the factor are those of transformers' functions, and so are cosine and sine."""
    scaling, parameters = SCALINGS[name]
    settings = settings_of(parameters, share)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    frequency_R, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](settings)
    rotary = Rotary(BASE, share=share, scaling=scaling)
    torch.testing.assert_close(rotary.inverse_frequencies(SIZE), frequency_R, rtol=1e-6, atol=0)
    assert rotary.attention_factor == pytest.approx(factor, rel=1e-6)
    plain_R = Rotary(BASE, share=share).inverse_frequencies(SIZE)
    assert (frequency_R / plain_R - 1).abs().max() > 0.1  # the scaling does something
    whole = LlamaRotaryEmbedding(settings)(torch.zeros(1), torch.arange(LENGTH)[None])
    for found_SR, expected_1SD in zip(angles(LENGTH, SIZE, rotary, torch.device("cpu")), whole, strict=True):
        torch.testing.assert_close(found_SR, expected_1SD[0].chunk(2, dim=-1)[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", FORMS)
def test_heads_turn_as_in_transformers(name: str, compiled: bool) -> None:
    """Partial heads as in Glm4Moe, interleaved pairs as in DeepSeek-V3; heads and gradients."""
    pytest.importorskip("transformers")
    rotary, mixed = FORMS[name], draw(9, 2, 3, 3 * SIZE).requires_grad_()
    exact = mixed.detach().clone().requires_grad_()
    found = apply_rotary(mixed[..., SIZE : 2 * SIZE], rotary)
    expected = theirs(exact[..., SIZE : 2 * SIZE], rotary)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    upstream = draw(*found.shape, seed=3)
    found.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(mixed.grad, exact.grad, rtol=0, atol=1e-6)


def theirs(heads_SBND: Tensor, rotary: Rotary) -> Tensor:
    """Turn heads by transformers' functions, which take [B, N, S, D]."""
    folder = "deepseek_v3" if rotary.interleaved else "glm4_moe"
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    tables = angles(len(heads_SBND), SIZE, rotary, torch.device("cpu"))
    cosine_1SD, sine_1SD = (torch.cat((table_SR, table_SR), dim=-1)[None] for table_SR in tables)
    heads_BNSD = heads_SBND.permute(1, 2, 0, 3)
    if rotary.interleaved:
        turning, staying = heads_BNSD.split([cosine_1SD.shape[-1], SIZE - cosine_1SD.shape[-1]], dim=-1)
        turned, _ = module.apply_rotary_pos_emb_interleave(turning, turning, cosine_1SD, sine_1SD)
        turned = torch.cat((turned, staying), dim=-1)
    else:
        turned, _ = module.apply_rotary_pos_emb(heads_BNSD, heads_BNSD, cosine_1SD, sine_1SD)
    return turned.permute(2, 0, 1, 3)


@pytest.mark.parametrize("name", FORMS)
def test_attention_turns_what_it_gets(name: str, compiled: bool) -> None:
    """Attention with rotary positions is attention of turned heads; in documents too, with gradients."""
    rotary = FORMS[name]
    documents = Documents.of(torch.tensor([[0] * 30 + [30] * 40, [0] * 70]))
    for each_documents in (None, documents):
        sides = make((70, 2, 4, 2, SIZE))
        query, key, value = each(lambda side: side.detach().clone().requires_grad_(), sides)
        found = causal_attention(*sides, rotary, None, each_documents)
        turned = (
            apply_rotary_with_documents(side, rotary, each_documents, kernels()) for side in (query, key)
        )
        expected = causal_attention(*turned, value, None, None, each_documents)
        assert_close_to(found, expected.double(), 1e-5)
        upstream = draw(*found.shape, seed=9)
        gradients = torch.autograd.grad(found, sides, upstream)
        wanted = torch.autograd.grad(expected, (query, key, value), upstream)
        for one, other in zip(gradients, wanted, strict=True):
            assert_close_to(one, other.double(), 1e-5, unit=0.1)


def test_columns_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="found heads of 6, of which 3 turn"):
        apply_rotary(draw(2, 1, 1, 6), Rotary(BASE, share=0.5))
