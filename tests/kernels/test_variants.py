"""Attention with windows, sinks and soft-capped scores against its formula in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megamoe.kernels.attention import core as attention
from megamoe.kernels.attention import variants
from megamoe.kernels.attention.documents import Documents
from megamoe.kernels.attention.variants import Variant, varied_attention
from megamoe.kernels.library import Library
from tests.kernels.test_attention import ROTARY, Sides, each, make
from tests.kernels.test_documents import as_documented, documents_of
from tests.support.kernels.chosen import causal_attention, use_compiled
from tests.support.kernels.drawn import assert_all_close_to, assert_close_to, draw, exact_attention

# Window, soft cap, whether there are sinks.
VARIANTS = {
    "window": (20, None, False),
    "a window of one": (1, None, False),
    "longer than all": (500, None, True),
    "sinks": (None, None, True),
    "window and sinks": (65, None, True),
    "soft cap": (None, 1.5, False),
    "all": (70, 1.5, True),
}
# Positions, sequences, query heads, key heads, columns; 64 queries make a block of the compiled kernel.
SIZES = {
    "one position": (1, 3, 2, 2, 4),
    "a block and one": (65, 2, 2, 2, 6),
    "queries share keys": (150, 2, 6, 2, 8),
}
LENGTHS = [60, 5, 85], [150]


def exact(sides: Sides, documents: Documents | None, variant: Variant) -> Tensor:
    place = torch.arange(len(sides[0]))
    visible = place <= place[:, None]
    if variant.window is not None:
        visible = visible & (place[:, None] - place < variant.window)
    if documents is not None:
        starts = documents.start_BS
        visible = visible & (starts[:, None, :, None] == starts[:, None, None, :])
    return exact_attention(*sides, visible, None, variant.soft_cap, variant.sinks_N)


def variant_of(name: str, heads: int) -> Variant:
    window, soft_cap, has_sinks = VARIANTS[name]
    return Variant(window, soft_cap, draw(heads, seed=7).requires_grad_() if has_sinks else None)


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor], exacts: list[Tensor]) -> None:
    """Outputs and all gradients; inputs and exacts: sides, and sinks if there are any."""
    assert_close_to(found, expected, 1e-5)
    upstream = draw(*found.shape, seed=9)
    gradients = torch.autograd.grad(found, inputs, upstream)
    assert_all_close_to(gradients, torch.autograd.grad(expected, exacts, upstream.double()), 1e-5, unit=1.0)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    ("size", "documented"), [*((size, False) for size in SIZES), ("queries share keys", True)]
)
def test_the_formula(
    size: str, name: str, documented: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "CHUNK", 32)
    sizes = SIZES[size]
    sides, variant = make(sizes), variant_of(name, sizes[2])
    documents = documents_of(*LENGTHS) if documented else None
    doubles = each(lambda side: side.detach().double().requires_grad_(), sides)
    inputs, exacts = list(sides), list(doubles)
    exact_variant = variant
    if variant.sinks_N is not None:
        sinks_N = variant.sinks_N.detach().double().requires_grad_()
        exact_variant = variant._replace(sinks_N=sinks_N)
        inputs, exacts = [*inputs, variant.sinks_N], [*exacts, sinks_N]
    found = causal_attention(*sides, documents=documents, variant=variant)
    assert_same(found, exact(doubles, documents, exact_variant), inputs, exacts)


@pytest.mark.parametrize("name", ["window and sinks", "soft cap", "all"])
def test_the_library_computes_every_variant_and_turns_heads(
    name: str, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides, documents = make((150, 2, 4, 2, 8)), documents_of(*LENGTHS)
    variant = variant_of(name, 4)
    use_compiled(False)
    expected = causal_attention(*sides, ROTARY, None, documents, variant)
    use_compiled(True)
    monkeypatch.setattr(attention, "varied_attention", None)
    found = causal_attention(*sides, ROTARY, None, documents, variant)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_sink_far_above_or_below_the_scores(library: Library) -> None:
    """It takes everything, or nothing."""
    sides = make((40, 1, 2, 2, 8))
    sinks_N = torch.tensor([200.0, -200.0], requires_grad=True)
    for soft_cap in (None, 1e6):
        found = causal_attention(*sides, variant=Variant(None, soft_cap, sinks_N))
        assert found[..., :8].abs().max() < 1e-30
        torch.testing.assert_close(found[..., 8:], causal_attention(*sides)[..., 8:], rtol=1e-4, atol=1e-5)
        assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(found.sum(), [*sides, sinks_N]))


@pytest.mark.parametrize("name", ["window and sinks", "all"])
def test_values_of_another_size_and_16_bits(name: str) -> None:
    query, key, _ = each(Tensor.bfloat16, make((70, 2, 4, 2, 8)))
    value, variant = draw(70, 2, 2, 6, seed=4).bfloat16().requires_grad_(), variant_of(name, 4)
    found = varied_attention(query, key, value, None, None, variant)
    assert found.dtype == torch.bfloat16 and found.shape == (70, 2, 24)
    exact_variant = variant._replace(sinks_N=None if variant.sinks_N is None else variant.sinks_N.double())
    expected = exact(each(Tensor.double, (query, key, value)), None, exact_variant)
    assert_close_to(found, expected, 2.0**-6)
    for gradient, side in zip(
        torch.autograd.grad(found.sum(), (query, key, value)), (query, key, value), strict=True
    ):
        assert gradient.dtype == side.dtype and gradient.shape == side.shape


class Largest(TorchDispatchMode):
    """The largest tensor that an operator returned, in numbers."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else [result]
        self.numbers = max([self.numbers, *(each.numel() for each in results if isinstance(each, Tensor))])
        return result


def test_no_matrix_of_all_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "CHUNK", 32)
    length, window, heads = 512, 16, 2
    sides, largest = make((length, 1, heads, heads, 8)), Largest()
    with largest:
        output = varied_attention(*sides, None, None, Variant(window, 5.0, draw(heads).requires_grad_()))
        torch.autograd.grad(output.sum(), sides)
    assert heads * length * 8 <= largest.numbers <= max(heads * length * 24, heads * 32 * (32 + window))


@pytest.mark.parametrize("documented", [False, True])
def test_windows_by_pytorchs_packed_attention(documented: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, of which `varlen_attn` as its documentation has it stands here."""
    sides = make((150, 2, 4, 2, 8))
    documents = documents_of(*LENGTHS) if documented else None
    use_compiled(False)
    expected = causal_attention(*sides, None, None, documents, Variant(window=9))
    monkeypatch.setattr(attention, "fits_varlen", lambda query: True)
    monkeypatch.setattr(attention, "varied_attention", None)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", as_documented)
    found = causal_attention(*sides, None, None, documents, Variant(window=9))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
