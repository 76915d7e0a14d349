"""`per_expert`: every expert has C = ceil(factor * k * T / E) slots.

A pair without a place is dropped: its token passes through the residual alone (Lepikhin et al. 2021; Fedus et
al. 2021, eq. 3). T is the micro batch of one data-parallel rank, so a drop never depends on how the experts
are spread over ranks. k is the selector's, or 1 if it varies by token, which gives XMoE's C = gamma * T / E
(Yang et al. 2024, eq. 3); with `above` it is `mean`. Megatron-Core and DeepSpeed count the same way. If a
paper counts tokens for k = 2, its factor is twice ours (GShard: 2.0 there is 1.0 here).

Experts of another size (XMoE eq. 6): the layer's cost is gamma * T * (an expert's cost). Experts of 1/n of
the size keep that cost with n times the `factor`, as the paper trains them; the configuration must set it.
With factor = E and k = 1 nothing is dropped (its section 3.6 on dense models).

E counts the experts that the step-wide masks leave open: half of them under expert dropout, or one rank's own
under gating dropout. The slots of the others then grow, and `factor` keeps its meaning; the papers do not
say. A mask that depends on the token (`group_limit`, `entropy_prune`) does not change E, so a router that
sends all tokens to a few experts does not raise their capacity.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe import rng
from megamoe.moe.capacity.slots import num_open, place_in_group, share_of_pairs, value_of_pairs
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import CapacitySlots, Pairs, Scored
from megamoe.registry import get_part, register

BY_VALUE = ("probability", "choice_then_probability", "batch_prioritised")
BY_CHOICE = ("choice_then_probability", "batch_prioritised", "choice_then_position")


@register("capacity", "per_expert")
class PerExpertCapacity(Part):
    """At most C pairs per expert, the first by priority; ties go to the earlier pair (token, then choice).

    position: the first tokens of the micro batch (Switch).
    probability: the largest p of the pair. This is DeepSpeed's `probs`, and Megatron-Core's if weights are
    raw: its own compares the weights after normalisation.
    choice_then_probability: all first choices before all second ones, the larger p first. This is XMoE's p -
    i (section 3.2, algorithm 1) as two keys: the sum would round p away.
    batch_prioritised: first choices first, then the tokens whose largest p is the largest (Riquelme et al.
    2021, V-MoE, section 4.1).
    choice_then_position: first choices first, then token order (Lepikhin et al. 2021, GShard, algorithm 1).
    random: an order drawn by token and choice, in training anew in every step; in evaluation always the same,
    so that it is reproducible and does not favour early tokens.

    Sigmoid p are compared by the scores, which have the same order and do not round to 1 or 0 in fp32.
    Softmax p are compared themselves, because scores of different tokens do not compare.

    With `tau`, of E experts that compute and Z that do not (`moe.zero_experts`), the first have C =
    ceil(gamma tau k T / (tau E + Z)) slots each, and the others ceil(gamma k T / (tau E + Z)) (Jin et al.
    2024, MoE++, arXiv 2410.07348, eq. 8, which has T in place of k T).

    Only `position` is causal: in the other orders a later token can take an earlier one's place.

    Source: Lepikhin et al. 2021 (GShard), algorithm 1; Fedus et al. 2021 (Switch), eq. 3; Yang et al. 2024
    (XMoE), eq. 3 and algorithm 1; Riquelme et al. 2021 (V-MoE), section 4.1.
    """

    @dataclass
    class Config:
        """factor: gamma. eval_factor: the factor in evaluation; default: the same. min_capacity: the least C,
        which none of the papers has; DeepSpeed's default is 4. priority: which pairs keep a place, see the
        class. pad: every expert computes C rows, those without a pair of zeros; then nobody waits for the
        numbers of rows, and all micro batches have the same. tau: beside experts without computation, the
        slots of an expert that computes over those of one that does not, see the class.
        """

        factor: float = 1.25
        eval_factor: float | None = None
        min_capacity: int = 0
        priority: Literal[
            "position",
            "probability",
            "choice_then_probability",
            "batch_prioritised",
            "choice_then_position",
            "random",
        ] = "position"
        pad: bool = False
        tau: float | None = None

        def __post_init__(self) -> None:
            if not self.factor > 0 or not (self.eval_factor is None or self.eval_factor > 0):
                raise ValueError("factor and eval_factor must be positive; for no limit use capacity: none")
            if self.tau is not None and not self.tau > 0:
                raise ValueError("tau must be positive")
            if self.tau is not None and self.pad:
                raise ValueError("pad gives every expert as many rows; leave out pad, or tau")
            if self.min_capacity < 0:
                raise ValueError("min_capacity must be at least 0")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"fixed_shares"} if options.pad else set()

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        zero = moe.zero_experts.total
        if zero and options.tau is None:
            raise ValueError(
                f"a capacity of {zero} experts that compute nothing (moe.zero_experts) would drop pairs that "
                "cost nothing; set tau to the slots of an expert that computes over theirs, or take none"
            )
        if not zero and options.tau is not None:
            raise ValueError(f"tau is {options.tau:g}, but every expert computes; leave it out")
        for choice in moe.router.masks if options.pad else []:
            if get_part("mask", choice.name).step_wide:
                raise ValueError(
                    f"pad: the mask {choice.name} closes experts in a step, and only the device knows "
                    "how many slots the others then have; set pad: false, or remove the mask"
                )

    def slots(self, num_tokens: int, open_E: Tensor | None = None) -> int | Tensor:
        """Return C, the slots of each expert, or with tau int64 [E]; open_E: see `Scored`."""
        factor = self.config.factor
        if not self.training and self.config.eval_factor is not None:
            factor = self.config.eval_factor
        if self.config.tau is not None:
            return self._places_of_both(factor, num_tokens)
        num_experts = num_open(open_E, self.dims.num_experts)
        wanted = share_of_pairs(factor, self.dims.num_choices * num_tokens, num_experts)
        floor = self.config.min_capacity
        return wanted.clamp_min(floor) if isinstance(wanted, Tensor) else max(wanted, floor)

    def _places_of_both(self, factor: float, num_tokens: int) -> Tensor:
        """Return the slots of every expert, int64 [E], with tau."""
        tau, zero = Fraction(str(self.config.tau)), self.dims.num_zero
        real = self.dims.num_experts - zero
        each = Fraction(str(factor)) * self.dims.num_choices * num_tokens / (tau * real + zero)
        sizes = max(math.ceil(tau * each), self.config.min_capacity), math.ceil(each)
        is_zero_E = torch.arange(self.dims.num_experts) >= real
        return torch.where(is_zero_E, sizes[1], sizes[0])

    def forward(self, pairs: Pairs, scored: Scored, context: StepContext) -> Tensor | CapacitySlots:
        """Return which pairs are kept, bool [N]; with `pad`, the slots."""
        rank_N = pairs.choice_N if self.config.priority in BY_CHOICE else None
        value_N = self._values(pairs, scored, context)
        place_N = place_in_group(pairs.expert_N, self.dims.num_experts, rank_N, value_N)
        size = self.slots(scored.num_tokens, scored.open_E)
        if isinstance(size, Tensor) and self.config.tau is not None:
            size = size.to(pairs.expert_N.device)[pairs.expert_N]
        if not self.config.pad:
            return place_N < size
        assert isinstance(size, int), "a step-wide mask changes the slots"
        return CapacitySlots(place_N, min(size, scored.num_tokens))

    def _values(self, pairs: Pairs, scored: Scored, context: StepContext) -> Tensor | None:
        """Return the values to compare, fp32 [N], the larger the better; None: the list's order decides."""
        match self.config.priority:
            case "probability" | "choice_then_probability":
                return value_of_pairs(scored.across_tokens_TE(scored.probs_TE), pairs)
            case "batch_prioritised":
                values_TE = scored.across_tokens_TE(scored.probs_TE)
                values_TE = scored.of_candidates_TE(values_TE, float("-inf"), self.dims.kernels)
                return values_TE.amax(dim=1)[pairs.token_N]
            case "random":
                step = context.step if self.training else 0
                draw_key = rng.key(context.seed, step, self.dims.layer, "capacity")
                index_T = context.token_index(scored.num_tokens, pairs.token_N.device)
                index_N = index_T[pairs.token_N] * self.dims.num_experts + pairs.choice_N
                return rng.uniform(draw_key, index_N, 1, kernels=self.dims.kernels).squeeze(1)
        return None
