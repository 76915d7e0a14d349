"""Checks of Triton's norms, rotary positions, cross entropy and order of rows; triton_checks.py runs them."""

from unittest import mock

import torch
from torch import Tensor

from megamoe.kernels.attention.core import split_heads
from megamoe.kernels.attention.rotary import Rotary, apply_rotary, apply_rotary_qk
from megamoe.kernels.cross_entropy import (
    Sums,
    Target,
    plain_statistics,
    plain_write_gradient,
    statistics,
    write_gradient,
)
from megamoe.kernels.experts.rows import Order, RowTokens, combine
from megamoe.kernels.rms_norm import rms_norm, summed_rms_norm
from tests.support.kernels.drawn import assert_close_to, assert_one_rounding, draw
from tests.support.kernels.interpreted import ON_TRITON, PLAIN, TOLERANCES, on_plain, on_triton

SHORT_NORMS: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((2, 3, 64), torch.float32),
    ((0, 16), torch.float32),
    ((3, 1030), torch.bfloat16),
    ((5, 7), torch.float16),
]
SHORT_TURNS = [(2, 1, torch.float32), (6, 5, torch.bfloat16)]


def check_rms_norm(cases: list[tuple[tuple[int, ...], torch.dtype]] = SHORT_NORMS) -> None:
    for shape, dtype in cases:
        hidden = draw(*shape).to(dtype).requires_grad_()
        weight = (1 + 0.3 * draw(shape[-1], seed=1)).to(dtype).requires_grad_()
        upstream = draw(*shape, seed=2).to(dtype)
        sides = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
        expected = sides[0] / (sides[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * sides[1]
        found = rms_norm(hidden, weight, 1e-5, ON_TRITON)
        gradients = torch.autograd.grad(found, [hidden, weight], upstream)
        exact = torch.autograd.grad(expected, sides, upstream.double())
        for one, other in zip([found, *gradients], [expected, *exact], strict=True):
            assert one.dtype == dtype
            assert_one_rounding(one, other, 4e-6)


def check_every_rms_norm() -> None:
    """300 rows of 7 are more than a program holds, and 9,000 more than all programs do at a time."""
    shapes = [(3, 5, 64), (2, 3), (300, 7), (9, 1030), (9000, 100)]
    check_rms_norm([(shape, dtype) for shape in shapes for dtype in TOLERANCES])


def check_a_norm_of_a_sum(cases: list[tuple[tuple[int, ...], torch.dtype]] = SHORT_NORMS) -> None:
    """The sum, its norm and all gradients against the formula in float64; without a summand too."""
    for shape, dtype in cases:
        for has_added in (True, False):
            sides = [draw(*shape), 1 + 0.3 * draw(shape[-1], seed=1), draw(*shape, seed=2)][: 2 + has_added]
            leaves = [side.to(dtype).requires_grad_() for side in sides]
            sent = [draw(*shape, seed=seed).to(dtype) for seed in (3, 4)]
            added = leaves[2] if has_added else None
            found = summed_rms_norm(leaves[0], added, leaves[1], 1e-5, ON_TRITON)
            gradients = torch.autograd.grad(found, leaves, sent)
            wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
            total = wide[0] + wide[2] if has_added else wide[0]
            # What is normed is the rounded sum.
            rounded = total + (total.detach().float().to(dtype).double() - total.detach())
            normed = rounded / (rounded.square().mean(-1, keepdim=True) + 1e-5).sqrt() * wide[1]
            exact = torch.autograd.grad([total, normed], wide, [each.double() for each in sent])
            for one, other in zip([*found, *gradients], [total, normed, *exact], strict=True):
                assert one.dtype == dtype
                # The interpreter cuts the sum off to bf16, where a GPU rounds it.
                assert_close_to(one, other, (2 if dtype == torch.float32 else 4) * TOLERANCES[dtype])


def check_every_norm_of_a_sum() -> None:
    shapes = [(3, 5, 64), (300, 7), (9000, 100)]
    check_a_norm_of_a_sum([(shape, dtype) for shape in shapes for dtype in TOLERANCES])


def check_gradients_of_heads_are_side_by_side() -> None:
    """Of one projection they are its gradient without a copy; heads of several shapes have their own."""
    for size, heads, dtype in ((6, 5, torch.float32), (2, 1, torch.bfloat16)):
        mixed = draw(4, 2, heads, 3 * size).to(dtype).requires_grad_()
        sent = [draw(4, 2, heads, size, seed=seed).to(dtype) for seed in (3, 4, 5)]
        with mock.patch("torch.cat", side_effect=AssertionError("a copy")):
            query, key, value = split_heads(mixed, [size] * 3)
            sides = apply_rotary_qk(query, key, value, Rotary(500), ON_TRITON)
            (gradient,) = torch.autograd.grad(sides, mixed, sent)
        assert all(side.is_contiguous() for side in sides[:2])
        exact = mixed.detach().double().requires_grad_()
        query, key, value = exact.split(size, dim=-1)
        expected = apply_rotary_qk(query, key, value, Rotary(500), PLAIN)
        (wanted,) = torch.autograd.grad(expected, exact, [each.double() for each in sent])
        for one, other in zip([*sides, gradient], [*expected, wanted], strict=True):
            assert_one_rounding(one, other)
    query, key, value = (draw(4, 2, heads, 6).requires_grad_() for heads in (4, 2, 2))
    found, plain = (
        apply_rotary_qk(query, key, value, Rotary(500), kernels) for kernels in (ON_TRITON, PLAIN)
    )
    sent = [draw(*side.shape, seed=3) for side in found]
    for one, other in zip(
        *(torch.autograd.grad(s, [query, key, value], sent) for s in (found, plain)), strict=True
    ):
        assert_close_to(one, other.double(), 3e-6)


def check_a_whole_model() -> None:
    """Blocks on Triton's kernels have the loss and all gradients of Megatron-Core's on plain ones."""
    from tests.support.tiny import VOCABULARY, tiny, tiny_gpt, world_of_one

    tokens_BS = torch.arange(16).view(2, 8) * 5 % VOCABULARY
    position_BS = torch.arange(8).expand(2, 8)
    router = "moe.router.selector={name: top_k, k: 2}"
    config = tiny("moe.losses={switch_balance: 0.3, z_loss: 0.1}", router, "model.cpu_kernels=plain")

    def run() -> list[Tensor]:
        model = tiny_gpt(config)
        losses_BS = model(tokens_BS, position_BS, tokens_BS.roll(-1, 1))
        return [losses_BS.detach(), *torch.autograd.grad(losses_BS.mean(), list(model.parameters()))]

    with world_of_one():
        with on_triton() as names:
            found = run()
        with on_plain():
            expected = run()
    assert names.count("rms_norm") == names.count("rms_norm_backward") == 5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def check_rotary(cases: list[tuple[int, int, torch.dtype]] = SHORT_TURNS) -> None:
    """Heads that are strided as in attention."""
    for size, heads, dtype in cases:
        mixed = draw(4, 2, heads, 3 * size).to(dtype).requires_grad_()
        found = apply_rotary(mixed[..., size : 2 * size], Rotary(500), ON_TRITON)
        exact = mixed.detach().double().requires_grad_()
        expected = apply_rotary(exact[..., size : 2 * size], Rotary(500), PLAIN)
        upstream = draw(2, heads, 4, size, seed=3).to(dtype).permute(2, 0, 1, 3)
        (gradient,) = torch.autograd.grad(found, mixed, upstream)
        (wanted,) = torch.autograd.grad(expected, exact, upstream.double())
        assert_one_rounding(found, expected)
        assert_one_rounding(gradient, wanted)


def check_every_rotary() -> None:
    """60 heads of 80 are more than a program holds."""
    sizes = [(2, 1), (6, 5), (64, 3), (80, 60)]
    check_rotary([(size, heads, dtype) for size, heads in sizes for dtype in TOLERANCES])


def check_cross_entropy() -> None:
    """Statistics and gradient are the plain ones; labels of other ranks' words, words of several blocks."""
    for tokens, words in ((5, 7), (3, 4096), (2, 5000), (0, 9)):
        for dtype in TOLERANCES:
            logits = (4 * draw(tokens, words)).to(dtype)
            label = torch.tensor([0, -3, words - 1, words, words + 70][:tokens])
            found, plain = statistics(logits, label, ON_TRITON), plain_statistics(logits, label)
            for one, other in zip(found, plain, strict=True):
                assert_close_to(one, other.double(), 3e-6)
            sums = Sums(plain.largest_T, plain.sum_T.reciprocal())
            sent, target = draw(tokens, seed=1), Target(0.9, 0.1 / words)
            by_kernel, expected = logits.clone(), logits.double()
            assert write_gradient(by_kernel, label, sums, sent, target, ON_TRITON) is by_kernel
            plain_write_gradient(expected, label, sums, sent, target)
            assert_one_rounding(by_kernel, expected)


def check_cross_entropy_of_infinite_logits() -> None:
    logits = torch.full((3, 5000), -torch.inf)
    logits[0, 4999], logits[1, 3], logits[2] = 2.0, torch.nan, 1.0
    found = statistics(logits, torch.tensor([4999, 0, 1]), ON_TRITON)
    assert found.largest_T[0] == 2 and found.sum_T[0] == 1 and found.label_logit_T[0] == 2
    assert found.sum_T[1].isnan()
    assert found.largest_T[2] == 1 and found.sum_T[2] == 5000


def check_the_first_sort_is_enough() -> None:
    """Rows by expert find their way back to their tokens without a second sort."""
    token_N = torch.tensor([0, 0, 1, 3, 3, 3, 4])
    expert_N = torch.tensor([2, 0, 1, 2, 1, 0, 0])
    order = Order.by_key(expert_N, 3, ON_TRITON)
    with mock.patch("torch.sort", side_effect=AssertionError("a second sort")):
        rows = RowTokens.of_pairs(token_N, order, 6, ON_TRITON)
    assert rows.row_N is not None and rows.ends_T is not None
    assert rows.ends_T.tolist() == [2, 3, 3, 6, 7, 7]
    assert torch.equal(token_N, rows.token_N[rows.row_N])
    rows_NH, weight_N = draw(7, 20), draw(7, seed=1)
    other = RowTokens.of(token_N[order.order_N], 6, ON_TRITON)
    found, expected = (combine(rows_NH, weight_N, each, ON_TRITON) for each in (rows, other))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
