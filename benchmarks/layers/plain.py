"""The limit, experts without routing, by a grouped and by a batched product; and a dense FFN."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from layers.candidate import Shape, Weights


def swiglu(rows: Tensor) -> Tensor:
    """[..., gate | value] -> silu(gate) * value."""
    gate, value = rows.chunk(2, dim=-1)
    return functional.silu(gate) * value


class Limit(nn.Module):
    """The experts on contiguous rows in equal numbers, [T*k, H]."""

    def __init__(self, shape: Shape, dtype: torch.dtype, weights: Weights) -> None:
        super().__init__()
        self.up_EGH = nn.Parameter(weights.up_EGH.to(dtype, copy=True))
        self.down_EHF = nn.Parameter(weights.down_EHF.to(dtype, copy=True))
        each = shape.pairs // shape.experts
        self.ends_E: Tensor
        self.register_buffer("ends_E", torch.arange(1, shape.experts + 1, dtype=torch.int32) * each)


class GroupedLimit(Limit):
    """PyTorch's grouped product."""

    def forward(self, rows_NH: Tensor) -> Tensor:
        """[T*k, H] -> [T*k, H]."""
        rows_NG = functional.grouped_mm(rows_NH, self.up_EGH.transpose(1, 2), offs=self.ends_E)
        return functional.grouped_mm(swiglu(rows_NG), self.down_EHF.transpose(1, 2), offs=self.ends_E)


class BatchedLimit(Limit):
    """PyTorch's batched product."""

    def forward(self, rows_NH: Tensor) -> Tensor:
        """[T*k, H] -> [T*k, H]."""
        rows_ENH = rows_NH.view(len(self.up_EGH), -1, rows_NH.shape[1])
        rows_ENG = torch.bmm(rows_ENH, self.up_EGH.transpose(1, 2))
        return torch.bmm(swiglu(rows_ENG), self.down_EHF.transpose(1, 2)).view_as(rows_NH)


class Dense(nn.Module):
    """A dense SwiGLU FFN as large as the k experts of one token: the first k, side by side."""

    def __init__(self, shape: Shape, dtype: torch.dtype, weights: Weights) -> None:
        super().__init__()
        up_kGH = weights.up_EGH[: shape.choices].view(shape.choices, 2, shape.ffn, shape.hidden)
        down_kHF = weights.down_EHF[: shape.choices]
        self.up = nn.Parameter(up_kGH.transpose(0, 1).reshape(-1, shape.hidden).to(dtype, copy=True))
        self.down = nn.Parameter(down_kHF.transpose(0, 1).reshape(shape.hidden, -1).to(dtype, copy=True))

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return functional.linear(swiglu(functional.linear(hidden_TH, self.up)), self.down)
