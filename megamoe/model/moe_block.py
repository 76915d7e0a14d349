"""The MoE layer in a Megatron-Core block: instead of its MLP, or after the block."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamoe.model.modules import Norm
from megamoe.model.scales import scale_residual
from megamoe.moe.layer import MoELayer
from megamoe.moe.recompute import DiscardedOutputs, recomputed


class MoEBlock(nn.Module):
    """Megatron-Core's MLP interface to our layer: [s, b, h] -> ([s, b, h], no bias).

    Megatron-Core's versions pass different keywords (pg_collection, name, ...), which are ignored.
    build_norm: builds a norm before the layer or, at norm_position "post", one for `residual`. recompute:
    recompute the layer in backward. output_activation: `moe.output_activation`.

    Under tensor parallelism each rank computes its own part of the positions, so no token is computed twice.
    Sequence parallelism already splits the positions; without it they are split here and gathered after the
    layer.
    """

    def __init__(
        self,
        config: Any,
        build: Callable[[], MoELayer],
        build_norm: Callable[[], nn.Module] | None = None,
        norm_position: Literal["pre", "post"] = "pre",
        recompute: bool = False,
        output_activation: Literal["sigmoid"] | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.norm_position = norm_position
        self.norm = None if build_norm is None else build_norm()
        self.layer = build()
        self.recompute = recompute
        self.activate = torch.sigmoid if output_activation == "sigmoid" else nn.Identity()
        self.spreads_tokens = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
        self.fp8 = bool(config.fp8)

    def forward(self, hidden_SBH: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, None]:
        """Run the layer on the micro batch's tokens, ordered by position: token s * B + b."""
        if self.recompute:
            return recomputed(self._compute, [self.layer], hidden_SBH, way=_checkpoint(self.fp8)), None
        return self._compute(hidden_SBH), None

    def _compute(self, hidden_SBH: Tensor) -> Tensor:
        norms = self.norm is not None and self.norm_position == "pre"
        normed_SBH = self.norm(hidden_SBH) if norms else hidden_SBH  # type: ignore[misc]
        if self.spreads_tokens:
            normed_SBH = scatter_to_sequence_parallel_region(normed_SBH)
        output_TH: Tensor = self.activate(self.layer(normed_SBH.reshape(-1, hidden_SBH.shape[-1])))
        output_SBH = output_TH.view_as(normed_SBH)
        if self.spreads_tokens:
            # The rest is equal on all ranks, and so is its gradient: each rank keeps its own part.
            output_SBH = gather_from_sequence_parallel_region(output_SBH, tensor_parallel_output_grad=False)
        return output_SBH

    def residual(self, hidden_SBH: Tensor) -> Tensor:
        """Return h + layer(h), with the norm before the layer or around the sum, [s, b, h]."""
        total_SBH = hidden_SBH + self(hidden_SBH)[0]
        if self.norm is None or self.norm_position == "pre":
            return total_SBH
        return self.norm(total_SBH)


class Block(TransformerLayer):
    """Megatron-Core's transformer block, optionally followed by an MoE layer on the residual stream.

    norm_position: "pre", Megatron-Core's, h := h + f(norm(h)), or "post", h := norm(h + f(h)) (Vaswani et al.
    2017), with the same norms. build_inserted: builds that layer: h := h + layer(h) (Lewis et al. 2021, BASE;
    Chi et al. 2022, X-MoE). Only its experts' own dropout applies to it, not model.hidden_dropout. recompute:
    recompute the block and the inserted layer in backward. residual_scale: multiplies everything that is
    added to the residual stream. built: called with the block when its weights are complete.
    """

    def __init__(
        self,
        *args: Any,
        build_inserted: Callable[[], MoEBlock] | None = None,
        norm_position: Literal["pre", "post"] = "pre",
        recompute: bool = False,
        residual_scale: float = 1.0,
        built: Callable[[nn.Module], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.inserted = None if build_inserted is None else build_inserted()
        self.recomputes = recompute
        self.discards = not recompute and bool(self.config.recomputed)
        self.passed_over = False  # set where a pipeline stage computes another of its chunks
        self.norm_position = norm_position
        for branch in (self.self_attention, self.cross_attention, self.mlp, self.inserted):
            if branch is not None and not isinstance(branch, IdentityOp):
                scale_residual(branch, residual_scale)
        if built is not None:
            built(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return (hidden states [s, b, h], context), as Megatron-Core does."""
        if self.passed_over:
            return kwargs["hidden_states"], kwargs.get("context")
        if self.recomputes:
            way = _checkpoint(bool(self.config.fp8))
            return recomputed(self._compute, self.moe_layers(), *args, way=way, **kwargs)
        with DiscardedOutputs() if self.discards and torch.is_grad_enabled() else nullcontext():
            return self._compute(*args, **kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if self.norm_position == "post":
            hidden_SBH, context = self._post_norm(*args, **kwargs)
        elif self._sums_in_norms(**kwargs):
            hidden_SBH, context = self._with_sums_in_norms(**kwargs), None
        else:
            hidden_SBH, context = super().forward(*args, **kwargs)
        if self.inserted is not None:
            hidden_SBH = self.inserted.residual(hidden_SBH)
        return hidden_SBH, context

    def _post_norm(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        context: Tensor | None = None,
        context_mask: Any = None,
        rotary_pos_emb: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the block with each norm after the sum of a sub-layer and its residual."""
        output = self.self_attention(
            hidden_states, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
        )
        hidden_states = self.input_layernorm(self._sum(self.self_attn_bda, output, hidden_states))
        if context is not None:
            output = self.cross_attention(
                hidden_states, attention_mask=context_mask, key_value_states=context
            )
            hidden_states = self._sum(self.cross_attn_bda, output, hidden_states)
            hidden_states = self.pre_cross_attn_layernorm(hidden_states)
        output = self.mlp(hidden_states)
        return self.pre_mlp_layernorm(self._sum(self.mlp_bda, output, hidden_states)), context

    def _sum(self, bias_dropout_add: Any, output: tuple[Tensor, Tensor | None], residual: Tensor) -> Tensor:
        add = bias_dropout_add(self.training, self.config.bias_dropout_fusion)
        return add(output, residual, self.hidden_dropout)

    def _sums_in_norms(
        self, hidden_states: Tensor | None = None, context: Tensor | None = None, **unused: Any
    ) -> bool:
        """Return whether the residual sums are parts of the norms' kernels.

        Megatron-Core's block does more than a sum where there are biases or dropout, or cross attention.
        """
        if (
            hidden_states is None
            or context is not None
            or self.config.add_bias_linear
            or self.config.attention_output_bias
            or (self.training and self.hidden_dropout)
        ):
            return False
        norms = (self.input_layernorm, self.pre_mlp_layernorm)
        return all(isinstance(norm, Norm) and norm.sums(hidden_states) for norm in norms)

    def _with_sums_in_norms(
        self, hidden_states: Tensor, attention_mask: Any = None, rotary_pos_emb: Any = None, **unused: Any
    ) -> Tensor:
        """Compute Megatron-Core's block, without biases and dropout: attention, then the FFN or MoE layer."""
        sum_SBH, normed_SBH = self.input_layernorm(hidden_states, with_sum=True)
        attended_SBH, _ = self.self_attention(
            normed_SBH, attention_mask=attention_mask, rotary_pos_emb=rotary_pos_emb
        )
        sum_SBH, normed_SBH = self.pre_mlp_layernorm(sum_SBH, attended_SBH, with_sum=True)
        output_SBH, _ = self.mlp(normed_SBH)
        return sum_SBH + output_SBH

    def moe_layers(self) -> list[MoELayer]:
        """Return the layer instead of the MLP and the inserted layer, if they exist."""
        return [module.layer for module in (self.mlp, self.inserted) if isinstance(module, MoEBlock)]


def _checkpoint(fp8: bool) -> Callable[..., Any]:
    """Return PyTorch's function or, for FP8 products, Transformer Engine's.

    That one enters the FP8 context again in backward, and reuses the first computation's `delayed` scales.
    """
    if not fp8:
        return checkpoint
    from transformer_engine.pytorch import checkpoint as engine_checkpoint

    return engine_checkpoint
