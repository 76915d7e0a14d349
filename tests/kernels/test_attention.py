"""Causal attention against its formula in float64, and the heads' gradients as one tensor."""

import math
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from megamoe.kernels.attention import core as attention
from megamoe.kernels.attention.core import split_heads
from megamoe.kernels.attention.rotary import Rotary
from megamoe.kernels.attention.variants import Variant
from megamoe.kernels.library import Library
from tests.support.kernels.chosen import causal_attention, kernels, plain_causal_attention, use_compiled
from tests.support.kernels.drawn import assert_all_close_to, assert_close_to, draw, exact_attention

# Positions, sequences, query heads, key heads, columns; 64 queries make a block.
SIZES = {
    "one position": (1, 3, 2, 2, 4),
    "less than a vector": (7, 2, 3, 3, 8),
    "a block": (64, 1, 2, 2, 16),
    "a block and one": (65, 2, 2, 2, 6),
    "blocks": (200, 1, 3, 3, 32),
    "queries share keys": (70, 2, 6, 2, 8),
    "all queries share one key": (33, 3, 4, 1, 2),
}
ROTARY = Rotary(100.0)
Sides = tuple[Tensor, Tensor, Tensor]


def exact(query: Tensor, key: Tensor, value: Tensor, base: float | None, scale: float) -> Tensor:
    """Compute causal attention in float64; a pair of columns is rotated as a complex number."""
    length, size = len(query), query.shape[-1]

    def rotate_half(side: Tensor) -> Tensor:
        if base is None:
            return side
        powers = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * powers
        pairs = (
            torch.complex(*side.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)[:, None, None]
        )
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    earlier = torch.ones(length, length, dtype=torch.bool).tril()
    return exact_attention(rotate_half(query), rotate_half(key), value, earlier, scale)


def make(sizes: tuple[int, int, int, int, int], factor: float = 1.0) -> Sides:
    """Query, key and value; of one projection where they are alike."""
    length, batch, heads, groups, size = sizes
    if heads == groups:
        mixed = factor * draw(length, batch, heads, 3 * size)
        return each(Tensor.requires_grad_, mixed.chunk(3, dim=-1))
    counts = enumerate((heads, groups, groups))
    return each(Tensor.requires_grad_, [factor * draw(length, batch, n, size, seed=i) for i, n in counts])


def each(change: Callable[[Tensor], Tensor], sides: Iterable[Tensor]) -> Sides:
    query, key, value = map(change, sides)
    return query, key, value


@pytest.mark.parametrize("base", [None, 50.0])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_formula(sizes: tuple[int, int, int, int, int], base: float | None, compiled: bool) -> None:
    sides = make(sizes)
    doubles = each(lambda side: side.detach().double().requires_grad_(), sides)
    found, expected = (
        causal_attention(*sides, base and Rotary(base)),
        exact(*doubles, base, sizes[-1] ** -0.5),
    )
    assert_close_to(found, expected, 1e-5)
    upstream = draw(*found.shape, seed=9)
    gradients = torch.autograd.grad(found, sides, upstream)
    assert_all_close_to(gradients, torch.autograd.grad(expected, doubles, upstream.double()), 1e-5, unit=0.1)


def test_two_positions_by_hand(compiled: bool) -> None:
    """The second one's scores are ln 3 and 0 over its scale: shares of 3/4 and 1/4."""
    query = torch.tensor([[5.0, 1.0], [math.log(3.0), 7.0]])[:, None, None].repeat(1, 4, 1, 1)
    key = torch.tensor([[2.0, 0.0], [0.0, 0.0]])[:, None, None].repeat(1, 4, 1, 1)
    value = torch.tensor([[4.0, 8.0], [0.0, -8.0]])[:, None, None].repeat(1, 4, 1, 1)
    found = causal_attention(query, key, value, scale=0.5)
    expected = torch.tensor([[4.0, 8.0], [3.0, 4.0]])[:, None].repeat(1, 4, 1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("factor", [1e-3, 30.0, 1e4])
def test_scores_of_any_size(factor: float, library: Library) -> None:
    sides = make((40, 2, 2, 2, 8), factor)
    found = causal_attention(*sides)
    expected = exact(*each(Tensor.double, sides), None, 8**-0.5)
    assert_close_to(found, expected, 1e-4)
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(found.sum(), sides))


@pytest.mark.parametrize(("length", "batch"), [(0, 2), (3, 0), (0, 0)])
def test_nothing_to_attend_to(length: int, batch: int, compiled: bool) -> None:
    sides = make((length, batch, 2, 2, 4))
    varied = causal_attention(*sides, variant=Variant(2, 5.0, torch.zeros(2)))
    for found in (causal_attention(*sides, ROTARY), varied):
        assert found.shape == (length, batch, 8)
        for side, gradient in zip(sides, torch.autograd.grad(found.sum(), sides), strict=True):
            assert gradient.shape == side.shape


def test_nothing_depends_on_the_threads(library: Library) -> None:
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        sides = make((100, 2, 6, 2, 8))
        output = causal_attention(*sides, ROTARY)
        found.append([output, *torch.autograd.grad(output, sides, draw(*output.shape, seed=5))])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def test_the_graph_can_be_gone_back_through_twice(library: Library) -> None:
    sides = make((66, 2, 2, 2, 8))
    output = causal_attention(*sides, ROTARY)
    first = torch.autograd.grad(output.sum(), sides, retain_graph=True)
    again = torch.autograd.grad(output.sum(), sides)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_what_the_library_does_not_take(library: Library) -> None:
    """Other types, columns apart, sizes that differ, and fewer heads than threads go to PyTorch."""
    heads = max(2, torch.get_num_threads())
    taken = make((5, 1, heads, heads, 4))
    assert attention._library_for(*taken, kernels()) is library
    assert attention._library_for(*each(Tensor.bfloat16, taken), kernels()) is None
    assert attention._library_for(*each(lambda side: side.transpose(2, 3), taken), kernels()) is None
    query, key, value = taken
    longer, wider = draw(6, 1, heads, 4), draw(5, 1, heads, 6)
    for others in ((longer, longer), (key, longer), (wider, value), (key, wider)):
        assert attention._library_for(query, *others, kernels()) is None
    assert attention._library_for(draw(5, 1, heads + 1, 4), key, value, kernels()) is None
    torch.set_num_threads(heads + 1)
    assert attention._library_for(*taken, kernels()) is None
    torch.set_num_threads(1)
    use_compiled(False)
    assert attention._library_for(*taken, kernels()) is None


def test_rotary_needs_an_even_width(compiled: bool) -> None:
    with pytest.raises(ValueError, match="found heads of 3"):
        causal_attention(*make((5, 2, 2, 2, 3)), ROTARY)


def test_plain_in_bf16(library: Library) -> None:
    sides = each(Tensor.bfloat16, make((9, 2, 2, 2, 8)))
    expected = exact(*each(Tensor.double, sides), 100.0, 8**-0.5)
    assert_close_to(causal_attention(*sides, ROTARY), expected, 2.0**-6)
    assert torch.equal(causal_attention(*sides, ROTARY), plain_causal_attention(*sides, ROTARY))


def test_gradients_beside_each_other_are_one_tensor() -> None:
    mixed = draw(3, 2, 12).requires_grad_()
    sizes = [2, 6, 4]
    slices = split_heads(mixed, sizes)
    assert all(torch.equal(*pair) for pair in zip(slices, mixed.split(sizes, dim=-1), strict=True))
    sent = draw(3, 2, 12, seed=1)
    (found,) = torch.autograd.grad(slices, mixed, sent.split(sizes, dim=-1), retain_graph=True)
    assert torch.equal(found, sent) and found.data_ptr() == sent.data_ptr()


SENT = draw(3, 2, 20, seed=1)
# In the last two a gradient begins where the one before would end if its columns followed each other.
APART: dict[str, list[Tensor]] = {
    "apart": [SENT[..., :4].clone(), SENT[..., 4:8].clone()],
    "swapped": [SENT[..., 4:8], SENT[..., :4]],
    "with a gap": [SENT[..., :4], SENT[..., 5:9]],
    "one of them apart": [SENT[..., :4], SENT[..., 4:8].clone()],
    "of two tensors": [SENT[..., :4], draw(3, 2, 20, seed=2)[..., 4:8]],
    "one column": [draw(60).as_strided((3, 2, 4), (16, 8, 0), start) for start in (0, 4)],
    "columns apart": [draw(60).as_strided((3, 2, 4), (16, 8, 2), start) for start in (0, 4)],
}


@pytest.mark.parametrize("parts", APART.values(), ids=APART)
def test_other_gradients_are_copied_together(parts: list[Tensor]) -> None:
    mixed = draw(3, 2, 8).requires_grad_()
    (found,) = torch.autograd.grad(split_heads(mixed, [4, 4]), mixed, parts)
    assert torch.equal(found, torch.cat(parts, dim=-1))


def test_the_gradients_of_one_projection_are_not_copied(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*unused: object, **also_unused: object) -> None:
        raise AssertionError("copied")

    mixed = draw(70, 2, 2, 24).requires_grad_()
    query, key, value = split_heads(mixed, [8, 8, 8])
    output = causal_attention(query, key, value, ROTARY)
    monkeypatch.setattr(torch, "cat", refuse)
    output.sum().backward()
    assert mixed.grad is not None and mixed.grad.is_contiguous()
