"""Linear layers, norms and attention: what the original computes, and what it refuses."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..common.recipe import DelayedScaling
from .fp8 import Call, FP8GlobalStateManager, calls


class Base(nn.Module):
    """Every module has an extra state, a tensor of bytes, like the original."""

    def get_extra_state(self) -> Tensor:
        return torch.zeros(3, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        raise AssertionError("extra states are not saved")

    def note(self, inp: Tensor, weights: list[Tensor], rows: list[int]) -> None:
        """Refuse what does not fit, and keep a record."""
        fp8 = FP8GlobalStateManager.is_fp8_enabled()
        for weight in weights:
            assert weight.dtype == inp.dtype, "Data types for parameters must match"
            assert weight.dim() == 2 and inp.shape[-1] == weight.shape[1], "GEMM not possible"
        if fp8:
            assert inp.dtype == torch.bfloat16
            unit = FP8GlobalStateManager.multiple()
            sizes = [*rows, *(size for weight in weights for size in weight.shape)]
            assert not any(size % unit for size in sizes), f"FP8 execution needs multiples of {unit}: {sizes}"
        calls.append(Call(self, fp8, rows))


class Linear(Base):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        rng_tracker_name: str | None = None,
    ) -> None:
        super().__init__()
        assert device == "cpu" and not fuse_wgrad_accumulation and tp_size == 1
        assert parallel_mode in ("column", "row") and init_method is not None
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.parallel_mode, self.tp_size = parallel_mode, tp_size
        self.save_original_input = False  # Megatron-Core sets it
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        with nullcontext() if get_rng_state_tracker is None else get_rng_state_tracker().fork():
            init_method(self.weight.data)
        self.quantised: Tensor | None = None  # of the first micro batch, for the further ones
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else torch.empty(0)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        assert not (self.save_original_input and isinstance(FP8GlobalStateManager.recipe, DelayedScaling))
        self.note(inp, [self.weight], [inp.shape[:-1].numel()])
        applied = self.bias if self.use_bias and not self.return_bias else None
        weight: Tensor = self.weight
        if is_first_microbatch is not None and FP8GlobalStateManager.is_fp8_enabled():
            if is_first_microbatch:
                self.quantised = self.weight.detach().clone()
            assert self.quantised is not None
            weight = self.weight + (self.quantised - self.weight).detach()
        out = functional.linear(inp, weight, applied)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Base):
    """Norm and linear layer in one: Megatron-Core makes a subclass of it; unused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("norms stay apart from linear layers")


class GroupedLinear(Base):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        assert not bias and device == "cpu" and init_method is not None
        self.num_gemms, self.out_features = num_gemms, out_features
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
            init_method(weight.data)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, inp: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Tensor:
        weights: list[Tensor] = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        assert isinstance(m_splits, list) and all(isinstance(rows, int) for rows in m_splits)
        assert len(m_splits) == self.num_gemms and sum(m_splits) == len(inp)
        self.note(inp, weights, m_splits)
        parts = zip(inp.split(m_splits), weights, strict=True)
        return torch.cat([functional.linear(rows, weight) for rows, weight in parts])


class RMSNorm(Base):
    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cuda",
    ) -> None:
        super().__init__()
        size = normalized_shape or hidden_size
        assert size is not None and device == "cpu" and not zero_centered_gamma
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=params_dtype))

    def forward(self, inp: Tensor) -> Tensor:
        return functional.rms_norm(inp, self.weight.shape, self.weight, self.eps)


class LayerNorm(RMSNorm):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, inp: Tensor) -> Tensor:
        return functional.layer_norm(inp, self.weight.shape, self.weight, self.bias, self.eps)


class DotProductAttention(Base):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.1,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        assert (qkv_format, attn_mask_type, attention_type) == ("sbhd", "causal", "self")
        self.scale, self.dropout = softmax_scale, attention_dropout

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: str | None = None,
    ) -> Tensor:
        """[s, b, heads, d] -> [s, b, heads * d]."""
        assert attention_mask is None and attn_mask_type == "causal"
        sides = query_layer, key_layer, value_layer
        query, key, value = (side.permute(1, 2, 0, 3) for side in sides)
        context = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout, scale=self.scale, enable_gqa=True
        )
        return context.permute(2, 0, 1, 3).flatten(2)
