"""Attention over packed documents: equal to separate sequences, to an explicit mask, and linear in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamoe.kernels.attention import core
from megamoe.kernels.attention import core as attention
from megamoe.kernels.attention.core import attend
from megamoe.kernels.attention.documents import Documents, Run
from megamoe.kernels.attention.rotary import Rotary
from megamoe.kernels.library import Library
from tests.kernels.test_attention import Sides, each, make
from tests.support.kernels.chosen import (
    apply_rotary,
    apply_rotary_with_documents,
    causal_attention,
    plain_causal_attention,
    use_compiled,
)
from tests.support.kernels.drawn import draw

# The lengths of the documents of two sequences; 64 queries make a block of the compiled kernel.
LENGTHS = {
    "one document": ([130], [130]),
    "one token each": ([1] * 70, [1] * 70),
    "a block's edge": ([64, 64, 2], [128, 2]),
    "beside a block's edge": ([63, 1, 66], [65, 65]),
    "short ones": ([3, 5, 1, 55, 6, 60], [130]),
    "long and short": ([100, 1, 1, 1, 27], [1, 129]),
    "ends in a block": ([70, 60, 70], [190, 5, 5]),
    "one token": ([1], [1]),
    "a run and a cut sequence": ([300, 20], [150, 150, 20]),
    "one document in each": ([300], [300]),
    "longer than a run": ([300, 200, 56, 1, 3], [20, 260, 260, 20]),
}
ROTARY = Rotary(100.0)


def documents_of(*lengths: list[int]) -> Documents:
    """From each sequence's lengths."""
    starts = [[sum(row[:i]) for i, length in enumerate(row) for _ in range(length)] for row in lengths]
    return Documents.of(torch.tensor(starts, dtype=torch.int32))


def separately(sides: Sides, documents: Documents, rotary: Rotary | None) -> Tensor:
    """Each document as a batch of its own, without the code that knows of documents."""
    columns = []
    for b in range(len(documents.start_BS)):
        lengths = documents.start_BS[b].unique(return_counts=True)[1].tolist()
        pieces = zip(*(side[:, b : b + 1].split(lengths) for side in sides), strict=True)
        columns.append(torch.cat([causal_attention(*each(torch.clone, piece), rotary) for piece in pieces]))
    return torch.cat(columns, dim=1)


def assert_equal_runs(found: Tensor, expected: Tensor, sides: Sides, others: Sides, tolerance: float) -> None:
    """Outputs and the gradients of the sides, to `tolerance` of the largest number."""
    upstream = draw(*found.shape, seed=9)
    mine = (found, *torch.autograd.grad(found, sides, upstream.to(found.dtype)))
    theirs = (expected, *torch.autograd.grad(expected, others, upstream.to(expected.dtype)))
    for one, other in zip(mine, theirs, strict=True):
        size = max(1.0, float(other.detach().abs().max()))
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_separate_sequences(lengths: tuple[list[int], list[int]], groups: int, compiled: bool) -> None:
    documents = documents_of(*lengths)
    sides = make((documents.start_BS.shape[1], 2, 4, groups, 8))
    for rotary in (None, ROTARY):
        found, expected = (
            causal_attention(*sides, rotary, None, documents),
            separately(sides, documents, rotary),
        )
        assert_equal_runs(found, expected, sides, sides, 1e-6)


@pytest.mark.usefixtures("two_threads")
def test_one_document_a_sequence_is_causal_attention_bit_for_bit(library: Library) -> None:
    sides = make((200, 2, 4, 2, 8))
    runs = [
        causal_attention(*sides, ROTARY, None, documents) for documents in (None, documents_of([200], [200]))
    ]
    sent = draw(*runs[0].shape, seed=3)
    found = [[run, *torch.autograd.grad(run, sides, sent)] for run in runs]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.usefixtures("two_threads")
def test_nothing_of_another_document_counts(library: Library) -> None:
    """Other numbers in one document leave the others' outputs and gradients as they were, bit for bit."""
    documents = documents_of([70, 50, 80])
    sides = make((200, 1, 4, 4, 8))
    changed = each(lambda side: side.detach().clone().requires_grad_(), sides)
    for side in changed:
        side.data[70:120] *= -1e4
    runs = []
    for each_sides in (sides, changed):
        output = causal_attention(*each_sides, ROTARY, None, documents)
        runs.append([output, *torch.autograd.grad(output, each_sides, draw(*output.shape, seed=2))])
    for one, other in zip(*runs, strict=True):
        assert torch.equal(one[:70], other[:70]) and torch.equal(one[120:], other[120:])
        assert not torch.equal(one[70:120], other[70:120])


def test_rotary_positions_begin_in_each_document() -> None:
    heads = draw(9, 2, 3, 4)
    found = apply_rotary_with_documents(heads, ROTARY, documents_of([4, 5], [9]))
    expected = torch.cat((apply_rotary(heads[:4], ROTARY), apply_rotary(heads[4:], ROTARY)))
    torch.testing.assert_close(found[:, 0], expected[:, 0], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[:, 1], apply_rotary(heads, ROTARY)[:, 1], rtol=0, atol=1e-6)


def test_dropout_stays_in_the_document() -> None:
    documents = documents_of([3, 4], [6, 1])
    query, key, _ = make((7, 2, 2, 2, 4))
    value = torch.zeros(7, 2, 2, 4)
    value[:3, 0] = 1.0
    torch.manual_seed(0)
    found = attend(query, key, value, documents, dropout_p=0.5)
    assert found[:3, 0].any() and not found[3:].any() and not found[:, 1].any()


def test_the_forms_of_documents() -> None:
    documents = documents_of([2, 3], [5], [1, 4])
    assert documents.bounds == (0, 2, 5, 10, 11, 15) and documents.longest == 5
    assert documents.bounds_D.tolist() == list(documents.bounds) and documents.bounds_D.dtype == torch.int32
    assert documents.start_BS.dtype == torch.int32 and documents.start_BS.is_contiguous()
    assert documents.runs(3) == [[Run(2, True), Run(3, True)], [Run(5, True)], [Run(1, True), Run(4, True)]]
    assert documents.runs(5) == [[Run(5, False)], [Run(5, True)], [Run(5, False)]]
    assert documents.visible(slice(2, 3), 1, 3).int().tolist() == [[[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]]
    assert documents.visible(slice(1, 3), 0, 2).int().tolist() == [[[[1, 0], [1, 1]]], [[[1, 0], [0, 1]]]]
    on_meta = Documents.of(documents.start_BS, "meta")
    assert on_meta.start_BS.is_meta and on_meta.bounds_D.is_meta and on_meta.bounds == documents.bounds


@pytest.mark.parametrize("starts", [[1, 1, 2], [0, 0, 1], [0, 2, 2], [0, 1, 0], [0, -1, 0]])
def test_starts_that_cannot_be(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="start_BS: expected"):
        Documents.of(torch.tensor([starts], dtype=torch.int32))


def test_documents_of_other_sequences() -> None:
    with pytest.raises(ValueError, match=r"found those of \[B, S\] = \(1, 6\), the queries have \(1, 5\)"):
        causal_attention(*make((5, 1, 2, 2, 4)), documents=documents_of([2, 4]))


def as_documented(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """PyTorch's `varlen_attn` as its documentation has it, in plain PyTorch."""
    assert cu_seq_q is cu_seq_k and cu_seq_q.dtype == torch.int32 and window_size[1] == 0
    lengths = cu_seq_q.diff().tolist()
    assert max_q == max_k == max(lengths)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    outputs = []
    for piece in zip(*(side.split(lengths) for side in (query, key, value)), strict=True):
        q, k, v = (side.transpose(0, 1) for side in piece)
        place = torch.arange(q.shape[1])
        seen = place <= place[:, None]
        if window_size[0] >= 0:
            seen &= place >= place[:, None] - window_size[0]
        mean = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(mean.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("groups", [4, 2])
def test_what_varlen_attention_is_given(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    """On CUDA; here by a stand-in that computes what PyTorch documents."""
    use_compiled(False)
    documents = documents_of([3, 6], [8, 1])
    sides = make((9, 2, 4, groups, 8))
    expected = plain_causal_attention(*sides, ROTARY, 0.3, documents)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", as_documented)
    monkeypatch.setattr(attention, "fits_varlen", lambda heads: True)
    found = plain_causal_attention(*sides, ROTARY, 0.3, documents)
    assert_equal_runs(found, expected, sides, sides, 1e-6)


def test_the_real_varlen_attention_takes_these_shapes() -> None:
    """PyTorch's own operator on tensors without numbers: shapes and types, forward and backward."""
    documents = Documents.of(documents_of([3, 6], [8, 1]).start_BS, "meta")
    sides = each(
        lambda side: side.detach().to("meta", torch.bfloat16).requires_grad_(), make((9, 2, 4, 2, 8))
    )
    output = core.varlen_attention(*sides, documents, 0.3)
    assert (output.shape, output.dtype) == ((9, 2, 32), torch.bfloat16)
    gradients = torch.autograd.grad(output.sum(), sides)
    assert [gradient.shape for gradient in gradients] == [side.shape for side in sides]


def test_which_heads_go_to_varlen_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    def heads(columns: int, dtype: torch.dtype, device: str) -> Any:
        from types import SimpleNamespace

        shape = torch.Size((9, 2, 4, columns))
        return SimpleNamespace(shape=shape, dtype=dtype, device=torch.device(device))

    able = {"cuda:0": (9, 0), "cuda:1": (7, 5)}
    monkeypatch.setattr(core, "_capability", lambda device: able[str(device)])
    assert core.fits_varlen(heads(64, torch.bfloat16, "cuda:0"))
    assert core.fits_varlen(heads(256, torch.float16, "cuda:0"))
    assert not core.fits_varlen(heads(64, torch.bfloat16, "cuda:1"))  # older than Ampere
    assert not core.fits_varlen(heads(64, torch.float32, "cuda:0"))
    assert not core.fits_varlen(heads(264, torch.bfloat16, "cuda:0"))
    assert not core.fits_varlen(heads(12, torch.bfloat16, "cuda:0"))
    assert not core.fits_varlen(heads(64, torch.bfloat16, "cpu"))
