"""A router's softmax and choice against their definitions."""

import math

import pytest
import torch

from megamoe.kernels.library import Library
from tests.support.kernels.chosen import masked, softmax, top_k
from tests.support.kernels.drawn import assert_close_to, draw

pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.mark.parametrize("shape", [(5, 1), (3, 8), (700, 13), (33, 130), (0, 4)], ids=str)
@pytest.mark.parametrize("factor", [1.0, 40.0])
def test_softmax(shape: tuple[int, int], factor: float, compiled: bool) -> None:
    scores = (factor * draw(*shape)).requires_grad_()
    exact = scores.detach().double().requires_grad_()
    found, powers = softmax(scores), (exact - exact.detach().amax(-1, keepdim=True)).exp()
    expected = powers / powers.sum(-1, keepdim=True)
    assert_close_to(found, expected, 3e-6)
    sent = draw(*shape, seed=1)
    (gradient,) = torch.autograd.grad(found, scores, sent)
    (other,) = torch.autograd.grad(expected, exact, sent.double())
    assert_close_to(gradient, other, 1e-5, unit=0.1)


def test_softmax_by_hand(compiled: bool) -> None:
    """Shares of 1 and 3; what is far below has exactly none; nothing to share is NaN."""
    off = -math.inf
    found = softmax(torch.tensor([[2.0, 2.0 + math.log(3.0), off], [200.0, 5.0, 0.0], [off, off, off]]))
    torch.testing.assert_close(found[0], torch.tensor([0.25, 0.75, 0.0]))
    assert found[1].tolist() == [1.0, 0.0, 0.0]
    assert found[2].isnan().all()


@pytest.mark.parametrize(
    ("shape", "count"), [((9, 4), 1), ((700, 13), 3), ((33, 130), 8), ((5, 6), 6), ((0, 4), 2), ((3, 30), 17)]
)
def test_top_k(shape: tuple[int, int], count: int, compiled: bool) -> None:
    ranking = draw(*shape)
    found = top_k(ranking, count)
    assert found.dtype == torch.int64
    rows = ranking.tolist()
    assert found.tolist() == [sorted(range(shape[1]), key=row.__getitem__)[: -count - 1 : -1] for row in rows]


def test_equal_numbers_infinities_and_nan(library: Library) -> None:
    off, nan = -math.inf, math.nan
    ranking = torch.tensor([[1.0, 2.0, 2.0, 1.0], [off, off, 3.0, off], [0.0, nan, math.inf, nan]])
    assert top_k(ranking, 3).tolist() == [[1, 2, 0], [2, 0, 1], [1, 3, 2]]


def test_more_than_there_are(compiled: bool) -> None:
    with pytest.raises(RuntimeError, match="out of range"):
        top_k(torch.zeros(2, 3), 4)


@pytest.mark.parametrize("shape", [(5, 1), (3, 8), (301, 33), (0, 4)], ids=str)
@pytest.mark.parametrize("otherwise", [0.0, -math.inf])
def test_masked(shape: tuple[int, int], otherwise: float, compiled: bool) -> None:
    """Also where values and gradients are not finite; a mask that is a view of another."""
    values = draw(*shape)
    values[::3] = math.nan
    values.requires_grad_()
    kept = (draw(*reversed(shape), seed=1) > 0).T
    found = masked(values, kept, otherwise)
    for value, keep, one in zip(*(side.flatten().tolist() for side in (values, kept, found)), strict=True):
        assert one == pytest.approx(value if keep else otherwise, nan_ok=True)
    sent = draw(*shape, seed=2)
    sent[:, ::2] = math.inf
    (gradient,) = torch.autograd.grad(found, values, sent)
    torch.testing.assert_close(gradient, torch.where(kept, sent, 0.0))
