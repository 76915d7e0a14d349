"""RMSNorm against its formula in float64, rotary positions against products of complex numbers."""

import pytest
import torch

from megamoe.kernels.attention.rotary import Rotary
from tests.support.kernels.chosen import apply_rotary, rms_norm
from tests.support.kernels.drawn import assert_close_to, draw

pytestmark = pytest.mark.usefixtures("two_threads")

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 64), (2, 3), (300, 7), (0, 16)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, compiled: bool) -> None:
    hidden = draw(*shape).to(dtype).requires_grad_()
    weight = (1 + 0.3 * draw(shape[-1], seed=1)).to(dtype).requires_grad_()
    upstream = draw(*shape, seed=2).to(dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    root = (exact[0].square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = exact[0] / root * exact[1]
    found = rms_norm(hidden, weight, 1e-5)
    assert found.dtype == dtype
    if found.numel() == 0:
        found.backward(upstream)
        assert weight.grad is not None and not weight.grad.any()
        return
    assert_close_to(found, expected, DTYPES[dtype])
    found.backward(upstream)
    expected.backward(upstream.double())
    for mine, theirs in zip((hidden, weight), exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert_close_to(mine.grad, theirs.grad, 2 * DTYPES[dtype])


def test_rms_norm_by_hand() -> None:
    """(3, 4): the mean square is 12.5."""
    found = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    torch.testing.assert_close(found, torch.tensor([[3.0, 8.0]]) / 12.5**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 6, 64])
def test_rotary(size: int, dtype: torch.dtype, compiled: bool) -> None:
    """Position s turns pair i by s * base^(-2i / size); queries are strided as in attention."""
    mixed = draw(9, 2, 3, 3 * size).to(dtype).requires_grad_()
    heads = mixed[..., size : 2 * size]
    found = apply_rotary(heads, Rotary(500))
    exact = mixed.detach().double().requires_grad_()
    first, second = exact[..., size : 2 * size].chunk(2, dim=-1)
    powers = 500.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turn = torch.polar(torch.ones(9, size // 2, dtype=torch.float64), torch.arange(9.0)[:, None] * powers)
    turned = torch.complex(first, second) * turn[:, None, None]
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    assert_close_to(found, expected, DTYPES[dtype])
    upstream = draw(2, 3, 9, size, seed=3).to(dtype).permute(2, 0, 1, 3)
    found.backward(upstream)
    expected.backward(upstream.double())
    assert mixed.grad is not None and exact.grad is not None
    assert_close_to(mixed.grad, exact.grad, DTYPES[dtype])
