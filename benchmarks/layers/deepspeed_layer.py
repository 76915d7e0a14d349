"""DeepSpeed's MoE layer on one rank, which drops nothing."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from layers.candidate import Shape, Weights
from layers.plain import swiglu
from layers.world import start_one_rank


class Expert(nn.Module):
    """A SwiGLU FFN."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(2 * ffn, hidden))
        self.down = nn.Parameter(torch.empty(hidden, ffn))

    def forward(self, rows_NH: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return functional.linear(swiglu(functional.linear(rows_NH, self.up)), self.down)


class DeepSpeedLayer(nn.Module):
    """`MOELayer` with `TopKGate`: capacity is the largest load, the second expert the second best."""

    def __init__(self, shape: Shape, dtype: torch.dtype, weights: Weights) -> None:
        super().__init__()
        start_one_rank()
        from deepspeed.moe.experts import Experts
        from deepspeed.moe.sharded_moe import MOELayer, TopKGate

        gate = TopKGate(
            shape.hidden,
            shape.experts,
            k=shape.choices,
            drop_tokens=False,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        gate.wg.weight.data.copy_(weights.router_EH)
        experts = Experts(Expert(shape.hidden, shape.ffn), shape.experts)
        for expert, up_GH, down_HF in zip(
            experts.deepspeed_experts, weights.up_EGH, weights.down_EHF, strict=True
        ):
            expert.up.data.copy_(up_GH)
            expert.down.data.copy_(down_HF)
        self.layer = MOELayer(gate, experts, "ep_size_1", ep_size=1, num_local_experts=shape.experts).to(
            dtype
        )

    def forward(self, hidden_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.layer(hidden_TH, None)
