"""Checks of Triton's passes over rows and routers in its interpreter; triton_checks.py runs them."""

import itertools
import math
import tempfile
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels import choice, router
from megamoe.kernels.choice import Kernels
from megamoe.kernels.experts import rows
from megamoe.kernels.experts.order import ends_of_counts
from megamoe.kernels.triton import TritonKernels
from megamoe.kernels.triton import router_sums as launchers
from tests.kernels import test_rows
from tests.kernels.test_layer import run_layer
from tests.kernels.test_rows import NAN, TOKENS, activated, combined, draw, gathered
from tests.support.kernels import chosen as passes
from tests.support.kernels.drawn import assert_one_rounding
from tests.support.kernels.interpreted import TOLERANCES, on_plain, on_triton, sparse

WIDTHS = [1, 7, 16, 1030]  # of the last, two blocks
CASES = [(case, 16, torch.float32) for case in TOKENS if case != "all of one"]


def exactly_gathered(dtype: torch.dtype, tokens: list[int], num_tokens: int, width: int) -> list[Tensor]:
    hidden_TH = draw(num_tokens, width).to(dtype).double().requires_grad_()
    rows_NH = hidden_TH[tokens]
    sent = draw(len(tokens), width, seed=1).to(dtype).double()
    return [rows_NH, *torch.autograd.grad(rows_NH, hidden_TH, sent)]


def exactly_combined(dtype: torch.dtype, tokens: list[int], num_tokens: int, width: int) -> list[Tensor]:
    rows_NH = draw(len(tokens), width).to(dtype).double().requires_grad_()
    weight_N = torch.linspace(-0.3, 1.1, len(tokens)).double().requires_grad_()
    member_TN = torch.tensor(tokens, dtype=torch.int64) == torch.arange(num_tokens)[:, None]
    output_TH = (member_TN * weight_N) @ rows_NH
    sent = draw(num_tokens, width, seed=1).to(dtype).double()
    return [output_TH, *torch.autograd.grad(output_TH, [rows_NH, weight_N], sent)]


def exactly_activated(dtype: torch.dtype, tokens: list[int], num_tokens: int, width: int) -> list[Tensor]:
    rows_N2F = (4 * draw(len(tokens), 2 * width)).to(dtype).double().requires_grad_()
    gate, value = rows_N2F.chunk(2, dim=-1)
    rows_NF = functional.silu(gate) * value
    sent = draw(len(tokens), width, seed=1).to(dtype).double()
    return [rows_NF, *torch.autograd.grad(rows_NF, rows_N2F, sent)]


PASSES: dict[str, tuple[Callable[..., list[Tensor]], Callable[..., list[Tensor]], list[str]]] = {
    "gather": (gathered, exactly_gathered, ["combine"]),
    "combine": (combined, exactly_combined, ["combine", "combine_backward"]),
    "swiglu": (activated, exactly_activated, ["swiglu", "swiglu_backward"]),
}


def close(found: list[Tensor], exact: list[Tensor], case: str) -> None:
    for one, expected in zip(found, exact, strict=True):
        try:
            assert_one_rounding(one, expected)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


CASES += [("uneven", 1030, torch.bfloat16), ("uneven", 7, torch.float16)]
EVERY_CASE = [(case, width, dtype) for case in TOKENS for width in WIDTHS for dtype in TOLERANCES]


def check_outputs_and_gradients_are_those_of_float64(
    cases: list[tuple[str, int, torch.dtype]] = CASES,
) -> None:
    for name, (run, exact, expected_names) in PASSES.items():
        for case, width, dtype in cases:
            with on_triton() as names:
                found = run(dtype, *TOKENS[case], width)
            assert names == expected_names
            close(found, exact(dtype, *TOKENS[case], width), f"{name}, {case}, {width}, {dtype}")


def check_all_outputs_and_gradients_are_those_of_float64() -> None:
    check_outputs_and_gradients_are_those_of_float64(EVERY_CASE)


def check_numbers_by_hand_and_at_extremes() -> None:
    """The tests of the other kernels, in which `compiled` has no effect here."""
    with on_triton() as names:
        for dtype in (torch.float32, torch.bfloat16):
            test_rows.test_combine_by_hand(compiled=False, dtype=dtype)
            test_rows.test_swiglu_at_extremes(compiled=False, dtype=dtype)
    assert names == ["combine", "combine_backward", "swiglu", "swiglu_backward"] * 2


def check_rows_by_token() -> None:
    strided_N = torch.tensor([[2, 9], [0, 9], [2, 9], [4, 9]])[:, 0]
    for token_N in (strided_N, strided_N.to(torch.int32)):
        row_N, ends_T = TritonKernels().rows_by_token(token_N, 5)
        assert (row_N.dtype, ends_T.dtype) == (torch.int64, torch.int64)
        assert (row_N.tolist(), ends_T.tolist()) == ([1, 0, 2, 3], [1, 1, 3, 3, 4])
    many_N = torch.randint(0, 13, (500,), generator=torch.Generator().manual_seed(0))
    row_N, ends_T = TritonKernels().rows_by_token(many_N, 15)
    assert torch.equal(row_N, torch.argsort(many_N, stable=True))
    assert torch.equal(ends_T, torch.bincount(many_N, minlength=15).cumsum(0))


def check_nothing_is_read_or_written_beside_the_rows() -> None:
    """The inputs are surrounded by NaN and the outputs by sevens."""

    def inside(numbers: Tensor, around: float) -> tuple[Tensor, Tensor]:
        edge = torch.full((2048,), around, dtype=numbers.dtype)
        whole = torch.cat([edge, numbers.flatten(), edge])
        return whole, whole[2048:-2048].view(numbers.shape)

    token_N, num_tokens = torch.tensor([2, 0, 2, 1]), 3  # the last has rows: the edge is beside what it reads
    count, kernels = len(token_N), cast(Any, TritonKernels())
    by_token = TritonKernels().rows_by_token(token_N, num_tokens)
    for width in (7, 1030):
        rows_NH = inside(draw(count, width), NAN)[1]
        rows_N2F = inside(draw(count, 2 * width), NAN)[1]
        sent_TH = inside(draw(num_tokens, width), NAN)[1]
        weight_N = inside(torch.ones(count), NAN)[1]
        shapes = [(num_tokens, width), (count, width), (count,), (count, width), (count, 2 * width)]
        wholes, (out, to_rows, to_weight, active, to_both) = zip(
            *(inside(torch.zeros(shape), 7) for shape in shapes), strict=True
        )
        kernels.combine(rows_NH, *by_token, weight_N, num_tokens, width, out)
        arguments = (sent_TH, rows_NH, token_N, weight_N, count, width)
        kernels.combine_backward(*arguments, to_rows, to_weight)
        kernels.swiglu(rows_N2F, count, width, active)
        kernels.swiglu_backward(rows_NH, rows_N2F, count, width, to_both)
        for whole in wholes:
            assert whole.isfinite().all()
            assert bool((whole[:2048] == 7).all()) and bool((whole[-2048:] == 7).all())


def check_a_nan_stays_in_its_token() -> None:
    rows_NH = torch.ones(3, 40)
    rows_NH[1, 33] = NAN
    with on_triton() as names:
        rows = passes.row_tokens(torch.tensor([0, 1, 0]), 2)
        output_TH = passes.combine(rows_NH, torch.ones(3), rows)
    assert names == ["combine"] and output_TH.isnan().nonzero().tolist() == [[1, 33]]


def check_rows_of_more_than_two_billion_numbers() -> None:
    """A sparse file holds only the row that is read; with 32-bit indices, row 1 would be read."""
    width, row = 2**10, 2**22 + 1
    with tempfile.TemporaryDirectory() as folder:
        rows_NH = sparse(folder, "rows", row + 1, width, dtype=torch.bfloat16)
        rows_NH[row] = 3
        out = torch.empty(1, width, dtype=torch.bfloat16)
        arguments = (rows_NH, torch.tensor([row]), torch.tensor([1]), None, 1, width, out)
        cast(Any, TritonKernels()).combine(*arguments)
        assert out.eq(3).all()


def check_what_does_not_fit_is_pytorchs() -> None:
    wide = draw(3, 80)
    with on_triton() as names:
        rows = passes.row_tokens(torch.tensor([0, 1, 0]), 2)
        passes.combine(wide[:, ::2], torch.ones(3), rows)
        passes.combine(wide.double(), torch.ones(3), rows)
        passes.gather(wide[:2, ::2].requires_grad_(), rows).sum().backward()
        passes.swiglu(wide[:, ::2])
        passes.swiglu(wide.view(3, 2, 40))
    assert names == []


def check_the_choice() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert Kernels().rows_on(cuda) is None
    assert isinstance(Kernels(triton=True).rows_on(cuda), TritonKernels)
    assert not isinstance(Kernels(triton=True).rows_on(cpu), TritonKernels)
    rows = mock.Mock(device=cuda, dtype=torch.bfloat16)
    for capability, expected in (((9, 0), False), ((10, 0), False), ((8, 0), True), ((12, 0), True)):
        choice.has_grouped_product.cache_clear()
        with (
            mock.patch("torch.cuda.is_available", return_value=True),
            mock.patch("torch.cuda.get_device_capability", return_value=capability),
        ):
            in_fp32 = mock.Mock(device=cuda, dtype=torch.float32)
            assert Kernels(triton=True).use_triton_grouped_gemm(rows, 1023) is expected
            assert Kernels(triton=True).use_triton_grouped_gemm(rows, 1024)  # too many for PyTorch's kernel
            assert Kernels(triton=True, triton_products=True).use_triton_grouped_gemm(rows, 8)
            assert Kernels(triton=True).use_triton_grouped_gemm(in_fp32, 8)
            assert not Kernels().use_triton_grouped_gemm(rows, 8)
    choice.has_grouped_product.cache_clear()


def check_a_whole_layer() -> None:
    with on_triton() as names:
        found = run_layer({"num_experts": 4}, 10, Kernels())
    both_ways = ("router_scores", "chosen_weights", "experts", "combine")
    once = ("combine", "gate_sums", "group_pairs")
    assert sorted(names) == sorted([*both_ways, *(f"{name}_backward" for name in both_ways), *once])
    with on_plain():
        expected = run_layer({"num_experts": 4}, 10, Kernels())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# Tokens, experts, hidden.
ROUTERS = [
    (1, 1, 16, torch.bfloat16),
    (70, 16, 64, torch.float32),
    (33, 5, 7, torch.bfloat16),
    (33, 5, 7, torch.float16),
    (0, 4, 8, torch.float32),
    (130, 100, 40, torch.float32),
]


def check_scores_of_a_router() -> None:
    """Output and gradients to fp32 rounding; the tokens' gradient to that of their dtype."""
    for tokens, experts, width, dtype in ROUTERS:
        hidden_TH = draw(tokens, width).to(dtype).requires_grad_()
        weight_EH = draw(experts, width, seed=1).to(dtype).requires_grad_()
        sent_TE = draw(tokens, experts, seed=2)
        sides = [side.detach().double().requires_grad_() for side in (hidden_TH, weight_EH)]
        exact_TE = sides[0] @ sides[1].T
        exact = [exact_TE, *torch.autograd.grad(exact_TE, sides, sent_TE.double())]
        with on_triton() as names:
            found_TE = router.scores(hidden_TH, weight_EH, Kernels())
            gradients = torch.autograd.grad(found_TE, [hidden_TH, weight_EH], sent_TE)
        assert names == ["router_scores", "router_scores_backward"]
        assert found_TE.dtype == torch.float32 and [g.dtype for g in gradients] == [dtype, dtype]
        case = f"{tokens} tokens, {experts} experts, {width}, {dtype}"
        close([found_TE.detach(), *gradients], [each.detach() for each in exact], case)


def check_weights_of_chosen_experts() -> None:
    """Also of tokens whose p underflow, with their scores and without, and whose p are all 0."""
    sizes = ((1, 2, 1), (70, 16, 2), (33, 5, 3), (0, 4, 2), (65, 100, 8))
    for (tokens, experts, choices), slope in itertools.product(sizes, (None, 0.5)):
        scores_TE = draw(tokens, experts)
        scores_TE[1::3] -= 2 * 90
        probs_TE = (0.5 * scores_TE).sigmoid() if slope else scores_TE.softmax(-1)
        if tokens > 1:
            probs_TE[1] = 0
        expert_TK = draw(tokens, experts, seed=1).topk(choices).indices
        sent_TK = draw(tokens, choices, seed=2)

        def run(
            probs_TE: Tensor, scores_TE: Tensor, expert_TK: Tensor, sent_TK: Tensor, slope: float | None
        ) -> list[Tensor]:
            both = probs_TE.clone().requires_grad_(), scores_TE.clone().requires_grad_()
            weight_TK = router.renormalised_weights(*both, expert_TK, slope, 2.5, Kernels(compiled=False))
            wanted = both if slope else both[:1]
            return [
                weight_TK.detach(),
                *torch.autograd.grad(weight_TK, wanted, sent_TK, materialize_grads=True),
            ]

        arguments = probs_TE, scores_TE, expert_TK, sent_TK, slope
        with on_triton() as names:
            found = run(*arguments)
        assert names == ["chosen_weights", "chosen_weights_backward"]
        with on_plain():
            expected = run(*arguments)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def sums_of_a_router(scores_TE: Tensor, token_N: Tensor, counts_E: Tensor) -> list[Tensor]:
    """Every term with its gradient, and what is observed; without tokens or with a p of 0 as well."""
    scores_TE = scores_TE.clone().requires_grad_()
    probs_TE = scores_TE.detach().softmax(-1)
    probs_TE[1:2], probs_TE[2:3, 1:] = 0, 0
    probs_TE.requires_grad_()
    squared = router.mean_squared_log_sum(scores_TE, Kernels(compiled=False))
    balance = router.balance(probs_TE, counts_E, Kernels(compiled=False))
    gradients = torch.autograd.grad(3 * squared - 2 * balance, [scores_TE, probs_TE])
    observed = router.gate_sums(probs_TE, token_N, Kernels(compiled=False))
    return [squared.detach(), balance.detach(), *gradients, *observed]


def check_sums_of_a_router() -> None:
    """Tokens of no pair, of one, and of more pairs than experts; two programs are fewer than the blocks."""
    for tokens, experts in ((1, 1), (70, 16), (33, 5), (0, 4), (130, 100)):
        scores_TE = 5 * draw(tokens, experts)
        token_N = torch.arange(tokens).repeat_interleave(2)
        token_N = token_N[token_N % 5 != 3]
        token_N = torch.cat([token_N[:1].repeat(experts + 1), token_N])
        counts_E = torch.arange(experts) ** 2
        with mock.patch.object(launchers, "PROGRAMS", 2), on_triton() as names:
            found = sums_of_a_router(scores_TE, token_N, counts_E)
        assert names == ["z_loss", "balance_loss", "z_loss_backward", "gate_sums"]
        with on_plain():
            expected = sums_of_a_router(scores_TE, token_N, counts_E)
        assert found[-1].dtype == torch.int64 and torch.equal(found[-1], expected[-1])
        torch.testing.assert_close(found, expected, rtol=3e-6, atol=1e-6)


def check_what_is_not_finite_stays_in_the_sums() -> None:
    scores_TE, token_N, counts_E = draw(3, 4), torch.tensor([0, 1]), torch.ones(4, dtype=torch.int64)
    for bad in (NAN, math.inf):
        scores_TE[1, 2] = bad
        with on_triton():
            squared = router.mean_squared_log_sum(scores_TE, Kernels())
            balance = router.balance(scores_TE, counts_E, Kernels())
            entropy, top_1, _ = router.gate_sums(scores_TE, token_N, Kernels())
        assert squared.isnan() and entropy.isnan() and top_1.isnan() and not balance.isfinite()
    scores_TE[1] = torch.tensor([1.0, -math.inf, 0.0, 2.0])
    found = []
    for context in (on_triton(), on_plain()):
        with context:
            leaf = scores_TE.clone().requires_grad_()
            squared = router.mean_squared_log_sum(leaf, Kernels(compiled=False))
            found.append([squared.detach(), *torch.autograd.grad(squared, leaf)])
    torch.testing.assert_close(found[0], found[1])


def check_pairs_by_expert() -> None:
    """Stable, with its inverse, counts and ends; blocks of many and of few pairs, experts without any."""
    for pairs, tokens, experts in ((9, 6, 3), (0, 4, 2), (0, 0, 2), (1, 1, 1), (600, 400, 5), (70, 90, 300)):
        token_N = torch.randint(0, max(tokens - 1, 1), (pairs,), generator=seeded(1)).sort().values
        expert_N = torch.randint(0, experts, (pairs,), generator=seeded(2)) // 2
        weight_N = draw(pairs).requires_grad_()
        sent_N = draw(pairs, seed=1)
        with on_triton() as names:
            found = rows.group_pairs(token_N, expert_N, weight_N, (tokens, experts), Kernels())
            (to_weight_N,) = torch.autograd.grad(found.weight_N, weight_N, sent_N)
        assert names == ["group_pairs"]
        order_N = torch.argsort(expert_N, stable=True)
        row_N, ends_T = found.rows.row_N, found.rows.ends_T
        assert row_N is not None and ends_T is not None and found.counts_E is not None
        assert torch.equal(row_N[order_N], torch.arange(pairs))
        assert torch.equal(found.rows.token_N, token_N[order_N]) and found.rows.num_tokens == tokens
        assert torch.equal(found.weight_N, weight_N[order_N]) and torch.equal(to_weight_N[order_N], sent_N)
        assert torch.equal(found.counts_E, torch.bincount(expert_N, minlength=experts))
        assert torch.equal(ends_T, rows.ends_of(token_N, tokens))
        with mock.patch.object(Tensor, "cumsum"):  # which costs a launch
            assert torch.equal(
                ends_of_counts(found.counts_E), torch.from_numpy(found.counts_E.numpy().cumsum())
            )


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
