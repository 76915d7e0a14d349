"""The shared experts, which every token visits, and how their output joins the routed ones'.

They need the layer's input alone: on CUDA they are computed on a stream of their own, while the rows travel
to the routed experts and back.
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

SharedMode = Literal["sum", "gated", "residual"]


class SharedExperts(nn.Module):
    """Experts that every token visits, as one FFN of their joint size, in one of three modes.

    sum       routed + shared (Dai et al. 2024, DeepSeekMoE, eq. 9)
    gated     routed + sigmoid(w . x) shared, as in Qwen's models; w starts at 0
    residual  c_0 routed + c_1 shared, c = softmax(W x + b) (Rajbhandari et al. 2022, DeepSpeed-MoE,
              Residual-MoE). The paper adds the two; the coefficients are those of its authors' code.

    Gates are worked out in fp32. std, output_std: of the first and the second weight at the start;
    init_scale: see `rng.start_weight`; the start depends on (seed, layer) alone.
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
        init_scale: float | None = None,
        kernels: Kernels = DEFAULT_KERNELS,
    ) -> None:
        super().__init__()
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
            starts.append((self.mix, std, "shared experts, mix"))
        for weight, weight_std, purpose in starts:
            rng.start_weight(weight, rng.key(seed, 0, layer, purpose), weight_std, init_scale)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> what the shared experts make of it, [T, H]; on CUDA it is ready for `join` alone."""
        if not hidden_TH.is_cuda:
            return self._ffn(hidden_TH)
        # Backward runs on forward's streams, and a weight's gradient is complete on the one that first met
        # the weight: the engine, which collects gradients as they come, must find them all on its own.
        met_here = [weight.view_as(weight) for weight in (self.up, self.down)]
        side = _side_stream(hidden_TH.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            shared_TH = self._ffn(hidden_TH)
        # ZeRO 3 takes the weights' memory back at once, and the input's may be free: not while `side` reads.
        for read in (hidden_TH, *met_here):
            read.record_stream(side)
        return shared_TH

    def _ffn(self, hidden_TH: Tensor) -> Tensor:
        rows_TF = activate(functional.linear(hidden_TH, self.up), self.activation, self.kernels)
        return functional.linear(rows_TF, self.down)

    def join(self, hidden_TH: Tensor, shared_TH: Tensor, routed_TH: Tensor) -> Tensor:
        """The input, what `forward` and what the routed experts made of it -> both together, [T, H]."""
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


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all layers: the allocator keeps memory for each stream."""
    return torch.cuda.Stream(device)
