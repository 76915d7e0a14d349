"""`hierarchical`: scores of two levels, for groups of experts and for the experts of a group."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.config.schema import MoEConfig
from megamoe.moe import rng
from megamoe.moe.part import Dims, Part, StepContext
from megamoe.registry import register


@register("scorer", "hierarchical")
class HierarchicalScorer(Part):
    """p(i) = p(group) p(i given group) over G groups of S = E/G neighbouring experts, each level with its own
    scores.

    The score is log p(i), so that a softmax returns p; losses and any selector may read it. The selector
    `hierarchical_top_k` chooses level by level. Each level is linear, H = x W_g, or, with `noisy`, H = x W_g
    + N(0, 1) softplus(x W_noise), with noise in training only. With `noisy`, W_g and W_noise are initialised
    to 0, so that every expert has about the same load at first. The secondary gating networks of all groups
    form one matrix [E, hidden].

    Source: Shazeer et al. 2017 (SGMoE), appendix B; noise: eq. 3-5; initialisation: appendix A.
    """

    experts_alike = True

    @dataclass
    class Config:
        """groups: G, a divisor of the number of experts; null: the divisor closest to its square root (16 for
        256, as in the paper). noisy: see the class.
        """

        groups: int | None = None
        noisy: bool = False

        def __post_init__(self) -> None:
            if self.groups is not None and self.groups < 1:
                raise ValueError("groups must be at least 1")

        def num_groups(self, num_experts: int) -> int:
            """Return the number of groups G."""
            divisors = [groups for groups in range(1, num_experts + 1) if num_experts % groups == 0]
            return self.groups or min(divisors, key=lambda groups: abs(groups - num_experts // groups))

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        noise = {"group_clean_TG", "inner_clean_TE", "group_std_TG", "inner_std_TE"}
        return {"log_probs", "group_scores_TG", "inner_scores_TE"} | (noise if options.noisy else set())

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {"softmax_of_scores": "since the scores are log p"}

    @classmethod
    def sizes(cls, options: Config, num_experts: int) -> dict[str, int]:
        return {"G": options.num_groups(num_experts)}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        groups = options.num_groups(moe.num_experts)
        if moe.num_experts % groups:
            raise ValueError(
                f"groups is {groups}, which does not divide the {moe.num_experts} experts (moe.num_experts); "
                "choose a divisor, or leave groups out"
            )

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.num_groups = config.num_groups(dims.num_experts)
        self.group_weight = self._weight(self.num_groups, "router groups")
        self.weight = self._weight(dims.num_experts, "router")
        if config.noisy:
            self.group_noise_weight = self._weight(self.num_groups, "router group noise")
            self.noise_weight = self._weight(dims.num_experts, "router noise")

    def forward(self, hidden_TH: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """[T, H] fp32 -> log p [T, E] fp32, and the scores of both levels as extras, all fp32.

        group_scores_TG, inner_scores_TE: H of each level. With `noisy` also group_clean_TG, inner_clean_TE: x
        W_g, and group_std_TG, inner_std_TE: the noise's standard deviation.
        """
        inner_TE = functional.linear(hidden_TH, self.weight.float())
        extras: dict[str, Tensor] = {}
        if self.config.noisy:
            # There are few groups: a second product for the noise would cost nearly as much again.
            both_weights = torch.cat([self.group_weight, self.group_noise_weight])
            group_TG, raw_TG = functional.linear(hidden_TH, both_weights.float()).chunk(2, dim=1)
            raw_TE = functional.linear(hidden_TH, self.noise_weight.float())
            group_std_TG, inner_std_TE = functional.softplus(raw_TG), functional.softplus(raw_TE)
            extras |= {"group_clean_TG": group_TG, "inner_clean_TE": inner_TE}
            extras |= {"group_std_TG": group_std_TG, "inner_std_TE": inner_std_TE}
            if self.training:
                sizes = [self.num_groups, self.dims.num_experts]
                noise = self.draws(context, "noise", hidden_TH, sum(sizes), rng.normal)
                group_eps_TG, inner_eps_TE = noise.split(sizes, dim=1)
                group_TG = torch.addcmul(group_TG, group_eps_TG, group_std_TG)
                inner_TE = torch.addcmul(inner_TE, inner_eps_TE, inner_std_TE)
        else:
            group_TG = functional.linear(hidden_TH, self.group_weight.float())
        extras |= {"group_scores_TG": group_TG, "inner_scores_TE": inner_TE}
        inner_TGS = inner_TE.unflatten(1, (self.num_groups, -1)).log_softmax(dim=-1)
        log_probs_TGS = group_TG.log_softmax(dim=-1)[:, :, None] + inner_TGS
        return log_probs_TGS.flatten(1), extras

    def _weight(self, rows: int, purpose: str) -> nn.Parameter:
        weight = nn.Parameter(torch.zeros(rows, self.dims.hidden_size))
        if not self.config.noisy:
            self.dims.init_weight(weight, purpose)
        return weight
