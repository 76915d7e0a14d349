"""The passes over rows: compiled against plain, outputs and every gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.kernels.experts.rows import permute
from megamoe.kernels.library import Library
from tests.support.kernels.chosen import combine, gather, order_by_key, row_tokens, swiglu, use_compiled

pytestmark = pytest.mark.usefixtures("two_threads")

# Each row's token, and the number of tokens: 0, 1 and many rows a token.
TOKENS: dict[str, tuple[list[int], int]] = {
    "uneven": ([2, 0, 2, 2, 5, 0, 2, 6, 2], 8),
    "one each": ([3, 1, 0, 2], 4),
    "all of one": ([1] * 40, 3),
    "no rows": ([], 4),
    "no tokens": ([], 0),
}
WIDTHS = [1, 7, 16, 257, 300]
# Every width with rows of each kind; the other numbers of rows do not meet it.
CASES = [("uneven", width) for width in WIDTHS] + [(name, 7) for name in TOKENS if name != "uneven"]
INF, NAN = torch.inf, torch.nan


def draw(*shape: int, seed: int = 0) -> Tensor:
    """fp32 numbers that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().float()


def gathered(dtype: torch.dtype, tokens: list[int], num_tokens: int, width: int) -> list[Tensor]:
    hidden_TH = draw(num_tokens, width).to(dtype).requires_grad_()
    rows_NH = gather(hidden_TH, row_tokens(torch.tensor(tokens, dtype=torch.int64), num_tokens))
    return [rows_NH, *torch.autograd.grad(rows_NH, hidden_TH, draw(len(tokens), width, seed=1).to(dtype))]


def combined(dtype: torch.dtype, tokens: list[int], num_tokens: int, width: int) -> list[Tensor]:
    rows_NH = draw(len(tokens), width).to(dtype).requires_grad_()
    weight_N = torch.linspace(-0.3, 1.1, len(tokens), requires_grad=True)
    rows = row_tokens(torch.tensor(tokens, dtype=torch.int64), num_tokens)
    output_TH = combine(rows_NH, weight_N, rows)
    sent = draw(num_tokens, width, seed=1).to(dtype)
    return [output_TH, *torch.autograd.grad(output_TH, [rows_NH, weight_N], sent)]


def activated(dtype: torch.dtype, tokens: list[int], num_tokens: int, width: int) -> list[Tensor]:
    rows_N2F = (4 * draw(len(tokens), 2 * width)).to(dtype).requires_grad_()
    rows_NF = swiglu(rows_N2F)
    return [rows_NF, *torch.autograd.grad(rows_NF, rows_N2F, draw(len(tokens), width, seed=1).to(dtype))]


def permuted(dtype: torch.dtype, tokens: list[int], num_tokens: int, width: int) -> list[Tensor]:
    values_N = draw(len(tokens), width).to(dtype).requires_grad_()
    order = order_by_key(torch.tensor(tokens, dtype=torch.int64), num_tokens)
    there_N = permute(values_N, order)
    back = permute(there_N, order.back())
    assert torch.equal(back, values_N)
    return [there_N, *torch.autograd.grad(there_N, values_N, draw(len(tokens), width, seed=1).to(dtype))]


@pytest.mark.parametrize(("tokens", "width"), CASES)
@pytest.mark.parametrize("passed", [gathered, combined, permuted, activated])
def test_compiled_equals_plain_with_gradients(
    passed: Callable[..., list[Tensor]], tokens: str, width: int, library: Library
) -> None:
    """bf16 is fp32 of the same numbers rounded once, or one step beside it: sums are in another order."""
    compiled = passed(torch.float32, *TOKENS[tokens], width)
    in_bf16 = passed(torch.bfloat16, *TOKENS[tokens], width)
    use_compiled(False)
    plain = passed(torch.float32, *TOKENS[tokens], width)
    torch.testing.assert_close(compiled, plain, rtol=2e-6, atol=5e-6)
    for found, expected in zip(in_bf16, plain, strict=True):
        of_weight = found.dtype == torch.float32
        tolerance = 2e-6 if of_weight else 2**-7
        rounded = expected if of_weight else expected.bfloat16()
        torch.testing.assert_close(found, rounded, rtol=tolerance, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_combine_by_hand(compiled: bool, dtype: torch.dtype) -> None:
    rows_NH = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=dtype, requires_grad=True)
    weight_N = torch.tensor([2, 1, 0.5], requires_grad=True)
    output_TH = combine(rows_NH, weight_N, row_tokens(torch.tensor([1, 0, 1]), 3))
    output_TH.backward(torch.tensor([[1, 0], [1, 1], [9, 9]], dtype=dtype))
    assert output_TH.tolist() == [[3, 4], [4.5, 7], [0, 0]]
    assert rows_NH.grad is not None and rows_NH.grad.tolist() == [[2, 2], [1, 0], [0.5, 0.5]]
    assert weight_N.grad is not None and weight_N.grad.tolist() == [3, 3, 11]


@pytest.mark.parametrize(
    ("keys", "size"),
    [([], 3), ([], 0), ([1, 1, 1], 4), ([3, 0, 3, 1, 0], 5), ([i * 7 % 13 for i in range(200)], 13)],
    ids=["no keys", "no keys of none", "one key", "keys with no rows", "many"],
)
def test_order_is_a_stable_sort(keys: list[int], size: int, compiled: bool) -> None:
    key_N = torch.tensor(keys, dtype=torch.int64)
    order = order_by_key(key_N, size)
    assert torch.equal(order.order_N, torch.argsort(key_N, stable=True))
    assert torch.equal(order.place_N, torch.argsort(order.order_N))
    assert torch.equal(order.back().order_N, order.place_N)


def test_row_tokens_know_each_tokens_rows(library: Library) -> None:
    rows = row_tokens(torch.tensor([2, 0, 2, 4]), 5)
    assert rows.row_N is not None and rows.row_N.tolist() == [1, 0, 2, 3]
    assert rows.ends_T is not None and rows.ends_T.tolist() == [1, 1, 3, 3, 4]


def test_keys_of_any_layout_and_integer_type(library: Library) -> None:
    strided_N = torch.tensor([[3, 9], [0, 9], [3, 9], [1, 9]])[:, 0]
    for key_N in (strided_N, strided_N.to(torch.int32)):
        assert order_by_key(key_N, 4).order_N.tolist() == [1, 3, 0, 2]


@pytest.mark.parametrize("key", [-1, 4, 2**62])
def test_a_key_out_of_range_is_refused(key: int, library: Library) -> None:
    with pytest.raises(IndexError, match="a key is not one of 0 .. 3"):
        order_by_key(torch.tensor([0, key]), 4)
    with pytest.raises(IndexError, match="a key is not one of 0 .. 3"):
        row_tokens(torch.tensor([0, key]), 4)


def test_memory_of_any_layout(library: Library) -> None:
    """Strided inputs and weights, and gradients that are transposed or one number in all places."""
    tokens, num_tokens, width = [2, 0, 2, 1], 3, 20

    def run() -> list[Tensor]:
        wide = draw(len(tokens), 2 * width).requires_grad_()
        weight_N2 = draw(len(tokens), 2, seed=1).requires_grad_()
        tall_HT = draw(width, num_tokens, seed=2).requires_grad_()
        rows = row_tokens(torch.tensor(tokens), num_tokens)
        output_TH = combine(wide[:, :width], weight_N2[:, 1], rows)
        taken = gather(tall_HT.T, rows) * 2 + gather(tall_HT.T.contiguous(), rows).T.contiguous().T
        active = swiglu(wide[:, 3 : 3 + width]).sum() + swiglu(wide).sum()
        objective = (output_TH.T @ draw(num_tokens, 1, seed=3)).sum() + taken.sum() + active
        return [output_TH, taken, *torch.autograd.grad(objective, [wide, weight_N2, tall_HT])]

    compiled = run()
    use_compiled(False)
    torch.testing.assert_close(compiled, run(), rtol=2e-6, atol=5e-6)


EXTREMES = [0.0, -0.0, 1e-30, -1.0, 88.5, -87.5, -88.5, 100, -100, 1e4, -1e4, 3e38, -3e38, INF, -INF, NAN]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_swiglu_at_extremes(compiled: bool, dtype: torch.dtype) -> None:
    """The results are those of float64: NaN stays NaN, and no infinity becomes finite.

    Both forms give NaN for a gate of -inf, and 0 for gates below -88.7, whose silu is below 1e-36.
    """
    gate, value = torch.cartesian_prod(torch.tensor(EXTREMES), torch.tensor([1.0, -0.5, 0.0, INF, NAN])).T
    rows_N2F = torch.stack([gate, value])[None].to(dtype).flatten(1).requires_grad_()
    exact_N2F = rows_N2F.detach().double().requires_grad_()
    gate, value = exact_N2F.chunk(2, dim=-1)
    share = torch.sigmoid(gate.detach())
    exact = gate.detach() * share * value.detach()
    exact_to_value = gate.detach() * share
    exact_to_gate = value.detach() * share * (1 + gate.detach() * (1 - share))
    found = swiglu(rows_N2F)
    (gradient,) = torch.autograd.grad(found.sum(), rows_N2F)
    to_gate, to_value = gradient.chunk(2, dim=-1)
    _same_kind(found, exact, dtype)
    _same_kind(to_value, exact_to_value, dtype)
    _same_kind(to_gate, exact_to_gate, dtype)


def _same_kind(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert bool(found[exact.isnan()].isnan().all())
    assert not bool(found[exact.isinf()].isfinite().any())
    finite = exact.isfinite()
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found[finite].double(), exact[finite], rtol=tolerance, atol=1e-35)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_nan_does_not_spread_to_other_tokens(dtype: torch.dtype, library: Library) -> None:
    rows_NH = torch.ones(3, 40, dtype=dtype)
    rows_NH[1, 33] = NAN
    output_TH = combine(rows_NH, torch.ones(3), row_tokens(torch.tensor([0, 1, 0]), 2))
    assert output_TH.isnan().nonzero().tolist() == [[1, 33]]


def test_bf16_is_rounded_as_by_pytorch(library: Library) -> None:
    """Ties round to even and overflow to infinity; NaN stays NaN, whatever its bits."""
    bits = torch.randint(0, 2**31, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    bits[:1024] = bits[:1024] & ~0xFFFF | 0x8000  # between two of bf16
    bits[-4:] = torch.tensor([0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF])
    number_N = bits.view(torch.float32)
    number_N = torch.cat([number_N, -number_N])
    rows = row_tokens(torch.arange(len(number_N)), len(number_N))
    rounded_N = combine(torch.ones(len(number_N), 1, dtype=torch.bfloat16), number_N, rows)[:, 0]
    torch.testing.assert_close(rounded_N, number_N.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("passed", ["gather", "combine", "permute", "swiglu"])
def test_second_derivatives_are_refused(passed: str, library: Library) -> None:
    rows, order = row_tokens(torch.tensor([0, 1]), 2), order_by_key(torch.tensor([1, 0]), 2)
    functions: dict[str, Callable[[Tensor], Any]] = {
        "gather": lambda values: gather(values, rows),
        "combine": lambda values: combine(values, torch.ones(2), rows),
        "permute": lambda values: permute(values, order),
        "swiglu": swiglu,
    }
    values = draw(2, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(functions[passed](values).square().sum(), values, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_rows_and_weights_of_other_numbers_are_refused() -> None:
    rows = row_tokens(torch.tensor([0, 1, 1]), 2)
    with pytest.raises(ValueError, match="found 3 rows, 2 weights, 3 tokens of rows"):
        combine(torch.zeros(3, 4), torch.zeros(2), rows)


def test_an_odd_width_has_no_halves() -> None:
    with pytest.raises(RuntimeError):
        swiglu(torch.zeros(2, 5))
