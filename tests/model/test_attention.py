"""Attention against the plain formula: softmax(Q K^T / sqrt(d) + mask) V."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megamoe.kernels.attention.documents import Documents
from megamoe.model.attention.core import SDPAttention
from megamoe.model.random_streams import use_one_stream

S, B, HEADS, D = 7, 2, 4, 6
CAUSAL = torch.ones(S, S, dtype=torch.bool).triu(1).expand(B, 1, S, S)


DOCUMENTS = Documents.of(torch.tensor([[0, 0, 0, 3, 3, 3, 3], [0, 0, 0, 0, 0, 5, 5]]))


def masked_out(documents: Documents | None) -> Tensor:
    """bool [B, 1, S, S], True = masked out: causal, and documents apart."""
    if documents is None:
        return CAUSAL
    document_BS = documents.start_BS
    return CAUSAL | (document_BS[:, :, None] != document_BS[:, None, :])[:, None]


def plain(inputs: list[Tensor], documents: Documents | None) -> Tensor:
    """[S, B, heads, D] each -> [S, B, heads * D]; a group serves consecutive heads."""
    query, key, value = (tensor.repeat_interleave(HEADS // tensor.shape[2], dim=2) for tensor in inputs)
    scores = torch.einsum("sbhd,tbhd->bhst", query, key) / math.sqrt(D)
    weights = scores.masked_fill(masked_out(documents), float("-inf")).softmax(dim=-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, value).reshape(S, B, HEADS * D)


@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
def test_forward_and_gradients(groups: int, documents: Documents | None) -> None:
    torch.manual_seed(0)
    shapes = (HEADS, groups, groups)
    inputs = [torch.randn(S, B, heads, D, dtype=torch.float64, requires_grad=True) for heads in shapes]
    attention = SDPAttention(SimpleNamespace(attention_dropout=0.0))
    found = attention(*inputs, documents)
    expected = plain(inputs, documents)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad(output, inputs, upstream) for output in (found, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
def test_a_scale_of_its_own(documents: Documents | None) -> None:
    inputs = [torch.randn(S, B, HEADS, D) for _ in range(3)]
    attention = SDPAttention(SimpleNamespace(attention_dropout=0.0, softmax_scale=0.1))
    expected = plain([0.1 * math.sqrt(D) * inputs[0], *inputs[1:]], documents)
    torch.testing.assert_close(attention(*inputs, documents), expected)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
def test_dropout_in_training_only(documents: Documents | None, one_rank: None) -> None:
    use_one_stream()
    inputs = [torch.randn(S, B, HEADS, D) for _ in range(3)]
    attention = SDPAttention(SimpleNamespace(attention_dropout=0.5))
    expected = plain(inputs, documents)
    assert not torch.allclose(attention(*inputs, documents), expected, atol=1e-3)
    torch.testing.assert_close(attention.eval()(*inputs, documents), expected)
