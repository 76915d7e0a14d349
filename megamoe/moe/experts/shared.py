"""The shared experts, which compute every token, and how their output is combined with the routed experts'.

They need only the layer's input. On CUDA they run on their own stream, while the rows are sent to the routed
experts and back.
"""

from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.config.schema import Activation
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.moe import rng
from megamoe.moe.experts.activations import activate, up_width
from megamoe.moe.recompute import discard_output

SharedMode = Literal["sum", "gated", "residual"]


class SharedExperts(nn.Module):
    """Experts that compute every token, as one FFN of their joint size, in one of three modes.

    sum       routed + shared (Dai et al. 2024, DeepSeekMoE, eq. 9)
    gated     routed + sigmoid(w . x) shared, as in Qwen's models; w is initialised to 0
    residual  c_0 routed + c_1 shared, c = softmax(W x + b) (Rajbhandari et al. 2022, DeepSpeed-MoE,
              Residual-MoE). The paper adds the two; the coefficients are from its authors' code.

    Gates are computed in fp32. std, output_std, mix_std: of the first and the second initial weight, and of
    W (default: std); init_scale: see `rng.init_weight`. The initial weights depend on (seed, layer) alone.
    recomputed: with `shared_experts`, only the input is kept for the backward pass.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        *,
        activation: Activation,
        mode: SharedMode,
        std: float,
        output_std: float,
        seed: int,
        layer: int,
        mix_std: float | None = None,
        init_scale: float | None = None,
        kernels: Kernels = DEFAULT_KERNELS,
        recomputed: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__()
        self.recomputes = "shared_experts" in recomputed
        self.kernels = kernels
        self.activation = activation
        self.mode = mode
        self.up = nn.Parameter(torch.empty(up_width(ffn_size, activation), hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, ffn_size))
        starts = [(self.up, std, "shared experts"), (self.down, output_std, "shared experts, down")]
        if mode == "gated":
            self.gate = nn.Parameter(torch.zeros(hidden_size))
        elif mode == "residual":
            self.mix = nn.Parameter(torch.empty(2, hidden_size))
            self.mix_bias = nn.Parameter(torch.zeros(2))
            starts.append((self.mix, std if mix_std is None else mix_std, "shared experts, mix"))
        for weight, weight_std, purpose in starts:
            rng.init_weight(weight, rng.key(seed, 0, layer, purpose), weight_std, init_scale)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Return the shared experts' output, [T, H]; on CUDA only `join` may use it."""
        if not hidden_TH.is_cuda:
            return self._ffn(hidden_TH)
        # Backward runs on forward's streams, and a weight's gradient is complete on the stream that first
        # used the weight. The engine collects gradients on the current stream, so it must be the first.
        used_here = [weight.view_as(weight) for weight in (self.up, self.down)]
        side = _side_stream(hidden_TH.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            shared_TH = self._ffn(hidden_TH)
        # ZeRO 3 frees the weights at once, and the input may be freed too: not while `side` reads them.
        for read in (hidden_TH, *used_here):
            read.record_stream(side)
        if shared_TH.requires_grad:
            # ZeRO 3 gathers the weights again for the backward pass, into other memory, before this hook.
            shared_TH.register_hook(lambda gradient: self._record_weights(side))
        return shared_TH

    def _record_weights(self, side: torch.cuda.Stream) -> None:
        for weight in (self.up, self.down):
            weight.data.record_stream(side)

    def _ffn(self, hidden_TH: Tensor) -> Tensor:
        if self.recomputes:
            rows_TF = discard_output(self._activated, discard_output(self._up, hidden_TH))
        else:
            rows_TF = self._activated(self._up(hidden_TH))
        return functional.linear(rows_TF, self.down)

    def _up(self, hidden_TH: Tensor) -> Tensor:
        return functional.linear(hidden_TH, self.up)

    def _activated(self, rows: Tensor) -> Tensor:
        return activate(rows, self.activation, self.kernels)

    def join(self, hidden_TH: Tensor, shared_TH: Tensor, routed_TH: Tensor) -> Tensor:
        """Combine the shared experts' output (from `forward`) with the routed experts' output, [T, H]."""
        if shared_TH.is_cuda:
            torch.cuda.current_stream().wait_stream(_side_stream(shared_TH.device))
            shared_TH.record_stream(torch.cuda.current_stream())
        if self.mode == "sum":
            return routed_TH + shared_TH
        if self.mode == "gated":
            weight_T = torch.mv(hidden_TH.float(), self.gate.float()).sigmoid()
            return routed_TH + shared_TH * weight_T[:, None].to(shared_TH.dtype)
        mix_T2 = functional.linear(hidden_TH.float(), self.mix.float(), self.mix_bias.float()).softmax(dim=-1)
        routed_T1, shared_T1 = mix_T2.to(shared_TH.dtype).split(1, dim=1)
        return routed_T1 * routed_TH + shared_T1 * shared_TH


class NoSharedExperts(nn.Module):
    """Stands in a layer without shared experts."""

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """Return the tokens, which `join` does not read."""
        return hidden_TH

    def join(self, hidden_TH: Tensor, shared_TH: Tensor, routed_TH: Tensor) -> Tensor:
        """Return the routed experts' output."""
        return routed_TH


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all layers: the allocator keeps separate memory for each stream."""
    return torch.cuda.Stream(device)
