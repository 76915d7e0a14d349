"""The classes that a block is built of: Megatron-Core's on PyTorch, our norms, Apex's norms, or
Transformer Engine's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import fused_apply_rotary_pos_emb
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn
from torch.nn import functional

from megamoe.compat.megatron_compat import ffn_submodules
from megamoe.compat.transformer_engine_compat import LentWeights
from megamoe.config.schema import ModelConfig, RunConfig
from megamoe.config.shapes import FP8_MULTIPLE, has_input_bias, has_output_bias
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.kernels.rms_norm import rms_norm, summed_rms_norm
from megamoe.model.attention.core import SDPAttention, SplittingSelfAttention
from megamoe.model.attention.head_norms import NormOfAllKeys, NormOfAllQueries, norm_of_each_head
from megamoe.model.backends import (
    engine_attends,
    fp8_format,
    has_cuda,
    uses_apex_norms,
    uses_transformer_engine,
)
from megamoe.model.linears import ColumnLinear, RowLinear
from megamoe.moe.experts.grouped import OWN_PRODUCTS, Products
from megamoe.moe.recompute import discard_output, register_discarded


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, by Megatron-Core's configuration (`BlockConfig`).

    Under sequence parallelism each rank has a part of the positions, so its gradients of weight and bias are
    partial. The parameters carry Megatron-Core's mark for gradients that must be summed.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.kernels: Kernels = getattr(config, "kernels", DEFAULT_KERNELS)
        self.discards = "norms" in getattr(config, "recomputed", ())
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if config.normalization == "LayerNorm" else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def sums(self, hidden: Tensor) -> bool:
        """Return whether `forward` with `with_sum` saves a pass over these hidden states."""
        return self.bias is None and self.kernels.uses_triton(hidden.device)

    def forward(self, hidden: Tensor, added: Tensor | None = None, with_sum: bool = False) -> Any:
        """Return the norm of `hidden`, [..., H] to the same shape.

        with_sum: return (hidden + added, its norm), see `summed_rms_norm`; for RMSNorm.
        """
        if with_sum:
            total, normed = summed_rms_norm(hidden, added, self.weight, self.eps, self.kernels)
            if self.discards:
                register_discarded(normed, self._normed, total)
            return total, normed
        return discard_output(self._normed, hidden) if self.discards else self._normed(hidden)

    def _normed(self, hidden: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(hidden, self.weight, self.eps, self.kernels)
        return functional.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)


class EngineProduct(nn.Module):
    """Transformer Engine's GroupedLinear without parameters of its own: a `GroupedProduct`.

    Its weights are views of the stacked weight, set for each call, and their gradients are stacked into the
    weight's gradient. So names, ZeRO, expert parallelism and checkpoints see stacked weights only. Only the
    FP8 scales stay here between calls, so each weight needs its own product.
    """

    def __init__(self, num_experts: int, in_size: int, out_size: int) -> None:
        from transformer_engine.pytorch import GroupedLinear

        super().__init__()
        self.linear = GroupedLinear(
            num_experts,
            in_size,
            out_size,
            bias=False,
            init_method=lambda weight: None,
            params_dtype=torch.float32,
            device="cpu",
        )
        self.weights = LentWeights(self.linear, num_experts)

    def forward(self, rows_NI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
        """rows_NI of the weight's dtype, grouped by expert; counts_E int64 on the CPU -> [N, out]."""
        with self.weights.lent(weight_EOI.unbind(0)) as linear:
            rows_NO: Tensor = linear(rows_NI, counts_E.tolist())
        return rows_NO


def transformer_engine_grouped_linear(fp8: str) -> Products:
    """Return the products by Transformer Engine; fp8: model.fp8, which needs padded rows."""
    return Products(EngineProduct, row_multiple=FP8_MULTIPLE.get(fp8, 1), host_counts=True)


AMAX_HISTORY = 1024  # Transformer Engine's default


@dataclass(frozen=True)
class Modules:
    """The classes of a block.

    norm: from (config, hidden_size, eps). linears: column and row parallel.
    own_rotation: `SDPAttention` applies the rotary positions, in fp32; else Megatron-Core applies them, in
    the model's dtype. fused_rotation: Megatron-Core applies them by Transformer Engine's fused kernel.
    """

    norm: Callable[..., nn.Module] = Norm
    core_attention: type = SDPAttention
    linears: tuple[type, type] = (ColumnLinear, RowLinear)
    products: Products = OWN_PRODUCTS
    own_rotation: bool = False
    fused_rotation: bool = False

    def put_into(self, spec: ModuleSpec, model: ModelConfig) -> None:
        """Insert the classes into Megatron-Core's local specification of a block with a dense FFN."""
        block = spec.submodules
        block.input_layernorm = block.pre_mlp_layernorm = self.norm
        attention = block.self_attention.submodules
        attention.core_attention = self.core_attention
        if self.core_attention is SDPAttention:
            block.self_attention.module = SplittingSelfAttention
        ffn = ffn_submodules(block.mlp)
        attention.linear_qkv, attention.linear_proj = self.linears
        ffn.linear_fc1, ffn.linear_fc2 = self.linears
        if model.bias != has_input_bias(model):
            attention.linear_qkv = with_bias(attention.linear_qkv, has_input_bias(model))
        if model.bias != has_output_bias(model):
            attention.linear_proj = with_bias(attention.linear_proj, has_output_bias(model))
        if model.attention.query_key_norm == "head":
            attention.q_layernorm = attention.k_layernorm = norm_of_each_head(self.norm)
        elif model.attention.query_key_norm == "whole":
            attention.q_layernorm, attention.k_layernorm = NormOfAllQueries, NormOfAllKeys


def with_bias(linear: Any, bias: bool) -> type[nn.Module]:
    """Return the class of a linear layer that has a bias or none, whatever Megatron-Core asks for.

    Its configuration has one key for the biases of the output projection and of dense FFNs, and none for
    projections of queries, keys and values without the bias that these have.
    """

    class Linear(linear):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "bias": bias})

    return Linear


def choose_modules(config: RunConfig, kernels: Kernels) -> Modules:
    """Return the classes that model.backend and model.norm_kernel select on this machine.

    Attention that is not only causal, or that exchanges heads under context parallelism, is always ours, with
    rotary positions of its own.
    """
    modules = _modules_of_decoder(config, kernels)
    if config.model.architecture == "decoder" and config.parallel.context == 1:
        return modules
    return replace(modules, core_attention=SDPAttention, own_rotation=True, fused_rotation=False)


def _modules_of_decoder(config: RunConfig, kernels: Kernels) -> Modules:
    if not uses_transformer_engine(config.model):
        norm = ApexNorm if uses_apex_norms(config.model) else Norm
        # Without a kernel of ours, Megatron-Core's operators move fewer bytes than our plain form.
        return Modules(norm=norm, own_rotation=not has_cuda() or kernels.triton)
    from megatron.core.extensions import transformer_engine as engine

    return Modules(
        norm=engine.TENorm,
        core_attention=engine.TEDotProductAttention if engine_attends(config) else SDPAttention,
        linears=(engine.TEColumnParallelLinear, engine.TERowParallelLinear),
        products=transformer_engine_grouped_linear(config.model.fp8),
        fused_rotation=fused_apply_rotary_pos_emb is not None,
    )


def fp8_options(model: ModelConfig) -> dict[str, Any]:
    """Return keyword arguments for Megatron-Core's TransformerConfig that put its blocks into the FP8
    context.

    Linear layers quantise their weights in every forward pass, as the experts' products do. Megatron-Core's
    copies of a step's first micro batch would have to be dropped after each update, and would keep in FP8
    what ZeRO 3 gives back.
    """
    options: dict[str, Any] = {"fp8": fp8_format(model)}
    if model.fp8 != "none":
        options["fp8_recipe"] = model.fp8
        options["disable_parameter_transpose_cache"] = True
    if model.fp8 == "delayed":
        options["fp8_amax_history_len"] = model.fp8_amax_history or AMAX_HISTORY
        options["fp8_amax_compute_algo"] = "max"
    return options


class ApexNorm:
    """Apex's fused LayerNorm or RMSNorm, with PyTorch's weight names; on the CPU it uses PyTorch.

    Megatron-Core's own wrapper of Apex has no RMSNorm.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
        from apex.normalization import FusedLayerNorm, FusedRMSNorm

        kind = FusedRMSNorm if config.normalization == "RMSNorm" else FusedLayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
