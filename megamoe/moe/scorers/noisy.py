"""`noisy`: a linear score plus normal noise with a learned scale for each token and expert."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.moe import rng
from megamoe.moe.part import Dims, Part, StepContext, mean_row_norm
from megamoe.registry import register


@register("scorer", "noisy")
class NoisyScorer(Part):
    """s = x W_g + eps * (softplus(x W_noise) + floor), eps ~ N(0, 1) for each token and expert.

    There is noise in training only; its draws are keyed by token. As the extras for the loss `load` it
    returns clean_TE, x W_g, and noise_std_TE, the noise's standard deviation, in evaluation too.

    Source: Shazeer et al. 2017 (SGMoE) eq. 4, and appendix A for the initialisation: W_g and W_noise are 0,
    "no signal and some noise", so that the load is even at first. tensor2tensor adds a floor of 1e-2 to the
    noise's scale; the paper has none.
    """

    @dataclass
    class Config:
        """noise_floor: added to the noise's standard deviation. start: the initial W_g and W_noise; `zero` as
        in the paper, or `normal` as for other weights.
        """

        noise_floor: float = 0.0
        start: Literal["zero", "normal"] = "zero"

        def __post_init__(self) -> None:
            if self.noise_floor < 0:
                raise ValueError("noise_floor must be at least 0")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"clean_TE", "noise_std_TE"}

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.weight = nn.Parameter(torch.zeros(dims.num_experts, dims.hidden_size))
        self.noise_weight = nn.Parameter(torch.zeros(dims.num_experts, dims.hidden_size))
        if config.start == "normal":
            dims.init_weight(self.weight, "router")
            dims.init_weight(self.noise_weight, "router_noise")

    def metrics(self) -> dict[str, Tensor]:
        """Return the mean L2 norm of the experts' rows of the weight."""
        return {"embedding_norm": mean_row_norm(self.weight)}

    def forward(self, hidden_TH: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """[T, H] fp32 -> scores [T, E] fp32, and the extras clean_TE and noise_std_TE, both fp32."""
        clean_TE = functional.linear(hidden_TH, self.weight.float())
        raw_TE = functional.linear(hidden_TH, self.noise_weight.float())
        noise_std_TE = functional.softplus(raw_TE)
        if self.config.noise_floor > 0:
            noise_std_TE = noise_std_TE + self.config.noise_floor
        extras = {"clean_TE": clean_TE, "noise_std_TE": noise_std_TE}
        if not self.training:
            return clean_TE, extras
        noise_TE = self.draws(context, "router_noise", clean_TE, clean_TE.shape[1], rng.normal)
        return torch.addcmul(clean_TE, noise_TE, noise_std_TE), extras
