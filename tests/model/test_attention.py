"""What `SDPAttention` adds to the kernels: a scale of its own, and dropout in training."""

from types import SimpleNamespace

import pytest
import torch

from megamoe.kernels.attention.documents import Documents
from megamoe.model.attention.core import SDPAttention
from megamoe.model.build import use_one_stream
from tests.support.kernels.drawn import exact_attention

S, B, HEADS, D = 7, 2, 4, 6
DOCUMENTS = Documents.of(torch.tensor([[0, 0, 0, 3, 3, 3, 3], [0, 0, 0, 0, 0, 5, 5]]))


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["whole", "documents"])
@pytest.mark.parametrize("scale", [None, 0.1])
def test_scale_and_dropout(documents: Documents | None, scale: float | None, one_rank: None) -> None:
    use_one_stream()
    query, key, value = (torch.randn(S, B, HEADS, D) for _ in range(3))
    inputs = (query, key, value)
    attention = SDPAttention(SimpleNamespace(attention_dropout=0.5, softmax_scale=scale))
    visible = torch.ones(S, S, dtype=torch.bool).tril()
    if documents is not None:
        start_BS = documents.start_BS
        visible = visible & (start_BS[:, :, None] == start_BS[:, None, :])[:, None]
    expected = exact_attention(*inputs, visible, scale)
    assert not torch.allclose(attention(*inputs, documents), expected, atol=1e-3)
    torch.testing.assert_close(attention.eval()(*inputs, documents), expected)
