"""The MoE layer in a Megatron-Core block: instead of its MLP, or after the block."""

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from megamoe.model.recompute import recomputed
from megamoe.moe.layer import MoELayer


class MoEBlock(nn.Module):
    """Megatron-Core's MLP interface to our layer: [s, b, h] -> ([s, b, h], no bias).

    Megatron-Core's versions pass different keywords (pg_collection, name, ...), which are ignored.
    build_norm: builds a norm before the layer. recompute: recompute the layer in backward.

    Under tensor parallelism each rank computes its own part of the positions, so no token is computed twice.
    Sequence parallelism already splits the positions; without it they are split here and gathered after the
    layer.
    """

    def __init__(
        self,
        config: Any,
        build: Callable[[], MoELayer],
        build_norm: Callable[[], nn.Module] | None = None,
        recompute: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.norm = None if build_norm is None else build_norm()
        self.layer = build()
        self.recompute = recompute
        self.spreads_tokens = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
        self.fp8 = bool(config.fp8)

    def forward(self, hidden_SBH: Tensor, *unused: Any, **also_unused: Any) -> tuple[Tensor, None]:
        """Run the layer on the micro batch's tokens, ordered by position: token s * B + b."""
        if self.recompute:
            return recomputed(self._compute, [self.layer], self.fp8, hidden_SBH), None
        return self._compute(hidden_SBH), None

    def _compute(self, hidden_SBH: Tensor) -> Tensor:
        normed_SBH = hidden_SBH if self.norm is None else self.norm(hidden_SBH)
        if self.spreads_tokens:
            normed_SBH = scatter_to_sequence_parallel_region(normed_SBH)
        output_TH: Tensor = self.layer(normed_SBH.reshape(-1, hidden_SBH.shape[-1]))
        output_SBH = output_TH.view_as(normed_SBH)
        if self.spreads_tokens:
            # The rest is equal on all ranks, and so is its gradient: each rank keeps its own part.
            output_SBH = gather_from_sequence_parallel_region(output_SBH, tensor_parallel_output_grad=False)
        return output_SBH


class Block(TransformerLayer):
    """Megatron-Core's transformer block, optionally followed by an MoE layer on the residual stream.

    build_inserted: builds that layer: h := h + layer(h) (Lewis et al. 2021, BASE; Chi et al. 2022, X-MoE).
    Only its experts' own dropout applies to it, not model.hidden_dropout. recompute: recompute the block and
    the inserted layer in backward. built: called with the block when its weights are complete.
    """

    def __init__(
        self,
        *args: Any,
        build_inserted: Callable[[], MoEBlock] | None = None,
        recompute: bool = False,
        built: Callable[[nn.Module], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.inserted = None if build_inserted is None else build_inserted()
        self.computed_again = recompute
        if built is not None:
            built(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return (hidden states [s, b, h], context), as Megatron-Core does."""
        if self.computed_again:
            return recomputed(self._compute, self.moe_layers(), bool(self.config.fp8), *args, **kwargs)
        return self._compute(*args, **kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        hidden_SBH, context = super().forward(*args, **kwargs)
        if self.inserted is not None:
            hidden_SBH = hidden_SBH + self.inserted(hidden_SBH)[0]
        return hidden_SBH, context

    def moe_layers(self) -> list[MoELayer]:
        """Return the layer instead of the MLP and the inserted layer, if they exist."""
        return [module.layer for module in (self.mlp, self.inserted) if isinstance(module, MoEBlock)]
