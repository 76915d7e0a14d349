"""`communication_balance`: makes every device receive the same number of tokens."""

from dataclasses import dataclass

from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.losses.common import group_probs, mean_over_sequences
from megamoe.moe.masks.expert_groups import check_groups
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.moe.validation import candidates_of, refuse_all_chosen
from megamoe.registry import register


@register("loss", "communication_balance")
class CommunicationBalance(Part):
    """sum_i f''_i P''_i over D groups of E/D neighbouring experts; 1 if every device gets M/D of the tokens.

    f''_i = D / (M T) times the tokens sent to device i, without gradient; each token counts once, however
    many of its experts it wants. M: the number of devices that a token may go to. P''_i: the sum over the
    group of P_j, as in `device_balance`.

    Source: DeepSeek-V2, section 2.2.3, communication balance loss.

    Scope: sequence, as for all of V2's balance losses: T counts a sequence's tokens, and the loss is the mean
    over sequences, so it does not depend on how the global batch is cut into micro batches.
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: factor in the total loss, alpha_3. num_groups: D, devices. keep: M, the same as in
        `group_limit`.
        """

        weight: float = 0.02
        num_groups: int = 8
        keep: int = 3

        def __post_init__(self) -> None:
            if self.num_groups < 2:
                raise ValueError("num_groups must be at least 2: over one group the loss is constant")
            if not 1 <= self.keep <= self.num_groups:
                raise ValueError(
                    f"keep must be at least 1 and at most num_groups {self.num_groups}, found {self.keep}"
                )

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        check_groups(options.num_groups, moe)
        refuse_all_chosen(moe, by_candidates=False)
        for choice in moe.router.masks:
            left = candidates_of(choice, moe.num_experts)
            limit = left.kept[1]
            if left.groups == options.num_groups and limit < left.groups and limit != options.keep:
                raise ValueError(
                    f"keep is {options.keep}, but the mask {choice.name} keeps {limit} of the "
                    f"{left.groups} groups; give both the same"
                )

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        num_groups, wanted = self.config.num_groups, routing.wanted
        sent_TD = routing.affinities_TE.new_zeros(routing.num_tokens, num_groups)
        sent_TD[wanted.token_N, wanted.expert_N // (routing.num_experts // num_groups)] = 1.0
        sent_BD = mean_over_sequences(sent_TD, context) * (num_groups / self.config.keep)
        probs_BD = group_probs(routing, num_groups, context)
        return (sent_BD * probs_BD).sum() / context.num_sequences
