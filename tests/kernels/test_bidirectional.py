"""Bidirectional and cross attention: against softmax(Q K') V with a plain mask, in fp64."""

import pytest
import torch
from torch import Tensor

from megamoe.kernels.attention.core import bidirectional_attention, cross_attention, turned
from megamoe.kernels.attention.documents import Documents, SourceLengths
from megamoe.kernels.attention.rotary import Rotary
from megamoe.kernels.choice import Kernels
from tests.support.kernels.drawn import exact_attention

PLAIN = Kernels(compiled=False)
HEADS, GROUPS, SIZE = 4, 2, 8


def heads(length: int, count: int, seed: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, batch, count, SIZE, generator=generator, dtype=torch.float64).requires_grad_()


def assert_same(found: Tensor, expected: Tensor, sides: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(found, expected)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(4), dtype=found.dtype)
    gradients = [torch.autograd.grad((each * weight).sum(), sides) for each in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("rotary", [None, Rotary(100.0)])
@pytest.mark.parametrize(
    "bounds_B",
    [
        [[0, 20], [0, 20]],
        [[0, 3, 5, 20], [0, 11, 20]],  # short documents: under one small mask
        [[0, 300, 340, 341, 700], [0, 10, 699, 700]],  # long ones by themselves
    ],
)
def test_within_documents(rotary: Rotary | None, bounds_B: list[list[int]]) -> None:
    length = bounds_B[0][-1]
    start_BS = torch.stack(
        [torch.repeat_interleave(torch.tensor(row[:-1]), torch.tensor(row).diff()) for row in bounds_B]
    )
    documents = Documents.of(start_BS)
    sides = (heads(length, HEADS, 1), heads(length, GROUPS, 2), heads(length, GROUPS, 3))
    query, key = turned(*sides[:2], rotary, documents, PLAIN)
    expected = exact_attention(query, key, sides[2], (start_BS[:, :, None] == start_BS[:, None, :])[:, None])
    found = bidirectional_attention(*sides, rotary, None, documents, kernels=PLAIN)
    assert_same(found, expected, sides)


def test_whole_sequences() -> None:
    sides = (heads(9, HEADS, 1), heads(9, GROUPS, 2), heads(9, GROUPS, 3))
    expected = exact_attention(*sides, torch.tensor(True))
    assert_same(bidirectional_attention(*sides, kernels=PLAIN), expected, sides)


@pytest.mark.parametrize("lengths", [(7, 7), (3, 7), (1, 2)])
def test_cross_attention(lengths: tuple[int, int]) -> None:
    sides = (heads(5, HEADS, 1), heads(7, HEADS, 2), heads(7, HEADS, 3))
    visible_BL = torch.arange(7) < torch.tensor(lengths)[:, None]
    expected = exact_attention(*sides, visible_BL[:, None, None])
    found = cross_attention(*sides, SourceLengths.of(torch.tensor(lengths), 7))
    assert_same(found, expected, sides)
    assert (SourceLengths.of(torch.tensor(lengths), 7) is None) == (lengths == (7, 7))


def test_padding_is_a_document() -> None:
    documents = Documents.of_lengths(torch.tensor([3, 5]), 5)
    assert documents is not None
    assert documents.start_BS.tolist() == [[0, 0, 0, 3, 3], [0] * 5]
    assert Documents.of_lengths(torch.tensor([5, 5]), 5) is None
