"""Checks of Triton's norms, rotary positions and losses beyond 2^31 numbers; triton_checks.py runs them."""

import tempfile

import torch
from torch import Tensor

from megamoe.kernels.triton import block, cross_entropy, router_sums
from megamoe.kernels.triton import block as launcher
from tests.support.kernels.drawn import assert_close_to, draw
from tests.support.kernels.interpreted import programs_from, sparse

LATE, LATE_WIDTH = 2**21 + 32, 2**10  # a row that begins beyond 2^31 numbers


def check_norms_of_late_rows() -> None:
    """Rows, sums, results and gradients beyond 2^31 numbers; the parts of the weight's gradient too."""
    sizes, count = {"ROWS": 2, "BLOCK": LATE_WIDTH}, LATE + 2
    weight, scale = draw(LATE_WIDTH, seed=1), torch.zeros(count)
    with tempfile.TemporaryDirectory() as folder, programs_from(LATE // 2):
        names = ("rows", "added", "sum", "out", "sent", "sent to the sum", "gradient")
        rows, added, total, out, sent, sent_to_sum, to_rows = (
            sparse(folder, name, count, LATE_WIDTH) for name in names
        )
        for seed, each in enumerate((rows, added, sent, sent_to_sum)):
            each[LATE:] = draw(2, LATE_WIDTH, seed=2 + seed)
        block._rms_norm[(1,)](*(rows, added, weight, count, LATE_WIDTH, 1e-5, total, out, scale), **sizes)
        late = (rows[LATE:] + added[LATE:]).double()
        exact, normed = exact_norm(late, weight.double(), sent[LATE:].double())
        assert torch.equal(total[LATE:], rows[LATE:] + added[LATE:])
        assert_close_to(out[LATE:], normed, 3e-6)
        part = sparse(folder, "parts", LATE // 2 + 1, LATE_WIDTH)
        block._rms_norm_backward[(1,)](
            *(sent, sent_to_sum, total, weight, scale, count, LATE_WIDTH, to_rows, part), **sizes
        )
        assert_close_to(to_rows[LATE:], exact[0] + sent_to_sum[LATE:].double(), 3e-6)
        assert_close_to(part[-1], exact[1], 3e-6)


def exact_norm(rows: Tensor, weight: Tensor, sent: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
    """The gradients of rows and weight, and the norm."""
    leaves = [rows.requires_grad_(), weight.requires_grad_()]
    normed = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    return torch.autograd.grad(normed, leaves, sent), normed.detach()


def check_rotary_of_late_positions() -> None:
    heads, half = 16, LATE_WIDTH // 32
    strides = (LATE_WIDTH, LATE_WIDTH, 2 * half)  # of positions, of the only sequence, of heads
    with tempfile.TemporaryDirectory() as folder, programs_from(LATE):
        given, out = (sparse(folder, name, LATE + 1, heads, 2 * half) for name in ("given", "out"))
        cosine, sine = (sparse(folder, name, LATE + 1, half) for name in ("cosine", "sine"))
        given[LATE], angle = draw(heads, 2 * half), draw(half, seed=1)
        cosine[LATE], sine[LATE] = angle.cos(), angle.sin()
        sides = (given, out, given, out, cosine, sine)
        arguments = (*sides, *(strides * 4), 1, heads, half, 1.0)
        launcher._rotate[(1,)](*arguments, HEADS=heads, BLOCK=half)
        first, second = given[LATE].double().chunk(2, dim=-1)
        cos, sin = cosine[LATE].double(), sine[LATE].double()
        expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        assert_close_to(out[LATE], expected, 3e-6)


def check_losses_of_late_tokens() -> None:
    """Cross entropy, and the sums over a router's scores."""
    tokens, words, experts = LATE + 1, LATE_WIDTH, 512
    label = torch.full((tokens,), 7)
    largest, sums, of_label, totals = (torch.zeros(tokens) for _ in range(4))
    with tempfile.TemporaryDirectory() as folder:
        logits = sparse(folder, "logits", tokens, words)
        logits[LATE] = draw(words)
        own = logits[LATE].double()
        with programs_from(LATE):
            results = (largest, sums, of_label, totals)
            cross_entropy._statistics[(1,)](logits, label, words, *results, BLOCK=words)
            assert largest[LATE] == own.max() and of_label[LATE] == own[7]
            assert_close_to(sums[LATE], (own - own.max()).exp().sum(), 3e-6)
            arguments = (logits, label, largest, 1 / sums, torch.ones(tokens), words, 1.0, 0.0)
            cross_entropy._gradient[(1,)](*arguments, BLOCK=words)
        expected = own.softmax(0)
        expected[7] -= 1
        assert_close_to(logits[LATE], expected, 3e-6)
        tokens = 2 * LATE + 2
        scores, to_scores = (sparse(folder, name, tokens, experts) for name in ("scores", "gradient"))
        scores[2 * LATE :] = draw(2, experts)
        late, log_sum = scores[2 * LATE :].double().requires_grad_(), torch.zeros(tokens)
        part, factor = torch.zeros(tokens), torch.zeros(experts)
        sizes = {"ROWS": 32, "EXPERTS": experts}
        exact = late.logsumexp(-1).square().sum() / tokens
        with programs_from(2 * LATE // 32):
            router_sums._z_loss[(1,)](scores, tokens, experts, log_sum, part, **sizes)
            assert_close_to(part[2 * LATE // 32], exact.detach(), 3e-6)
            router_sums._z_loss_backward[(1,)](
                *(torch.ones(()), scores, log_sum, tokens, experts, to_scores), **sizes
            )
            assert_close_to(to_scores[2 * LATE :], torch.autograd.grad(exact, late)[0], 3e-6)
            counts = torch.arange(experts)
            router_sums._balance_loss[(1,)](scores, counts, tokens, experts, factor, part, **sizes)
        share = experts / tokens * counts.double() / counts.sum()
        assert_close_to(part[2 * LATE // 32], (late.detach() * share).sum(), 1e-5)
