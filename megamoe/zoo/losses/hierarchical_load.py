"""`hierarchical_load`: balances a smooth estimate of each expert's tokens, for two levels of noisy gating.

Further shape suffixes: G groups, A groups that a token chose, S experts of a group.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import one_hot

from megamoe.config.schema import MoEConfig
from megamoe.moe.losses.common import choice_probability, squared_cv
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.validation import experts_wanted
from megamoe.registry import register

LEVEL = ("clean", "scores", "std")  # the scorer's extras of each level


@register("loss", "hierarchical_load")
class HierarchicalLoad(Part):
    """CV(Load_H)^2 over the E experts, with the population variance.

    Load_H,ij = Load_primary(X)_i Load_i(X^(i))_j / |X^(i)|. X^(i) are the tokens that chose group i. Load
    sums over tokens the probability Phi((clean_i - kth_excluding(H, k, i)) / std_i) that i would be among the
    k chosen if its own noise were drawn again. At a level that chooses everything this is 1.

    Source: Shazeer et al. 2017 (SGMoE), appendix B, eq. 14, with eq. 8-11.

    Scope: micro batch; the run's loss is the mean over its micro batches.

    Caveats: a group that no token chose has load 0 (0/0 in the paper). In evaluation H has no noise.
    Importance at both levels, eq. 13, is the loss `importance`, since the pairs' weights are the products.
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 0.1

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        names = [f"group_{name}_TG" for name in reversed(LEVEL)] + [f"inner_{name}_TE" for name in LEVEL]
        noise = "of two levels with noise, by which the load is estimated"
        return dict.fromkeys(names, noise) | {"chosen_groups_TA": "over which the load is summed"}

    @classmethod
    def refuses(cls, options: Config) -> dict[str, str]:
        return {"mask": "which the formula does not know"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        if experts_wanted(moe) >= moe.num_experts:
            raise ValueError(
                f"every token chooses all {moe.num_experts} experts, so that the load is constant; "
                "choose fewer groups or a smaller k in the selector, or leave the loss out"
            )

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        extras, group_TA = routing.extras, routing.extras["chosen_groups_TA"]
        num_groups, groups = extras["group_scores_TG"].shape[1], group_TA.shape[1]
        primary_TG = choice_probability([extras[f"group_{name}_TG"] for name in LEVEL], groups)
        inner_TGS = [extras[f"inner_{name}_TE"].unflatten(1, (num_groups, -1)) for name in LEVEL]
        index_TAS = group_TA[:, :, None].expand(-1, -1, inner_TGS[0].shape[2])
        chance_TAS = choice_probability(
            [part_TGS.gather(1, index_TAS) for part_TGS in inner_TGS], self.dims.num_choices // groups
        )
        # As a matrix product: index_add into [G, S] has no fixed order of summation on a GPU.
        chosen_TAG = one_hot(group_TA, num_groups).to(chance_TAS.dtype)
        chance_GS = chosen_TAG.flatten(0, 1).T @ chance_TAS.flatten(0, 1)
        inner_GS = chance_GS / chosen_TAG.sum(dim=(0, 1)).clamp_min(1)[:, None]
        load_GS = primary_TG.sum(dim=0)[:, None] * inner_GS
        return squared_cv(load_GS)
