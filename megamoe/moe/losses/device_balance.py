"""`device_balance`: makes every device get the same number of pairs, without balancing its own experts."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.losses.common import fractions, group_probs
from megamoe.moe.masks.expert_groups import check_groups
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing, count
from megamoe.moe.validation import refuse_all_chosen
from megamoe.registry import register


@register("loss", "device_balance")
class DeviceBalance(Part):
    """sum_i f'_i P'_i over D groups of E/D neighbouring experts; 1 at perfect balance.

    f'_i: the mean over the group's experts of f_j = E / (K T) times the tokens that chose j, without
    gradient. It is computed as D times the group's share of the wanted pairs, for any number of experts per
    token. P'_i: the sum over the group of P_j, the mean over tokens of s_j, the score function's values over
    all experts, before any mask. If these do not sum to 1, they are divided by their sum, as in DeepSeek-V3
    eq. 19.

    Source: DeepSeek-V2, section 2.2.3, device-level balance loss.

    Scope: sequence, as for all of V2's balance losses: T counts a sequence's tokens, and the loss is the mean
    over sequences, so it does not depend on how the global batch is cut into micro batches.
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: factor in the total loss, alpha_2. num_groups: D, devices."""

        weight: float = 0.05
        num_groups: int = 8

        def __post_init__(self) -> None:
            if self.num_groups < 2:
                raise ValueError("num_groups must be at least 2: over one group the loss is constant")

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        check_groups(options.num_groups, moe)
        refuse_all_chosen(moe, by_candidates=False)

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        num_groups, num_sequences = self.config.num_groups, context.num_sequences
        wanted, size = routing.wanted, routing.num_experts // num_groups
        sequence_N = context.sequence(routing.num_tokens, wanted.token_N.device)[wanted.token_N]
        cell_N = sequence_N * num_groups + wanted.expert_N // size
        counts_BD = count(cell_N, num_sequences * num_groups).view(num_sequences, num_groups)
        share_BD = fractions(counts_BD)
        probs_BD = group_probs(routing, num_groups, context)
        return num_groups * (share_BD * probs_BD).sum() / num_sequences
