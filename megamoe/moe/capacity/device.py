"""`device`: every device has a budget of pairs over all of its experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe import rng
from megamoe.moe.capacity.slots import num_open, place_in_group, share_of_pairs, value_of_pairs
from megamoe.moe.part import Part, StepContext
from megamoe.moe.routing import Pairs, Scored
from megamoe.registry import register


@register("capacity", "device")
class DeviceCapacity(Part):
    """Each of D devices, with E / D neighbouring experts, computes at most B = ceil(factor * k * T / D)
    pairs.

    Above the budget, the pairs of lowest affinity are dropped; of equal ones, the later. The affinity is the
    score function's value over all experts, before any mask, as the paper's s. Sigmoid affinities are
    compared by the scores, which have the same order. In training a share of the sequences is never dropped;
    it is drawn in every step and is the same in all layers. Their pairs come first, count against the budget,
    and are kept even beyond it. So the model sees both cases, and may be evaluated with drops or without (the
    default).

    Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.2.4 (factor 1.0, about 10 % of the training sequences)
    and 3.1.2 (no drops in evaluation).

    Our choices: T is the micro batch of one data-parallel rank, and each such rank fills its share of a
    device's budget; k is 1 if it varies by token, or `mean` of `above`. What is dropped depends on D: set
    `devices` for a run whose layout may change.
    """

    experts_alike = True

    @dataclass
    class Config:
        """devices: D; default: the expert-parallel ranks. factor: multiple of the average budget.
        eval_factor: the factor in evaluation, where no sequence is spared; default: no drops. spare: the
        share of sequences that are never dropped in training.
        """

        devices: int | None = None
        factor: float = 1.0
        eval_factor: float | None = None
        spare: float = 0.1

        def __post_init__(self) -> None:
            if self.devices is not None and self.devices < 1:
                raise ValueError("devices must be at least 1")
            if not self.factor > 0 or not (self.eval_factor is None or self.eval_factor > 0):
                raise ValueError("factor and eval_factor must be positive; for no limit use capacity: none")
            if not 0 <= self.spare < 1:
                raise ValueError("spare must be at least 0 and under 1; for no drops use capacity: none")

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        devices = options.devices or expert_parallel
        if devices == 1:
            raise ValueError("one device computes every pair, and nothing would be dropped; set devices")
        if moe.num_experts % devices:
            raise ValueError(
                f"{moe.num_experts} experts (moe.num_experts) do not divide over {devices} devices; "
                f"choose devices that divide {moe.num_experts}"
            )

    @property
    def num_devices(self) -> int:
        """The number of devices D."""
        return int(self.config.devices or self.dims.expert_parallel)

    def budget(self, num_tokens: int, open_E: Tensor | None = None) -> int | Tensor | None:
        """Return B, the pairs of each device; None: no limit.

        D counts the devices with an expert that the step-wide masks leave open (open_E, see `Scored`).
        """
        factor = self.config.factor if self.training else self.config.eval_factor
        if factor is None:
            return None
        num_pairs = self.dims.num_choices * num_tokens
        return share_of_pairs(factor, num_pairs, num_open(open_E, self.num_devices))

    def forward(self, pairs: Pairs, scored: Scored, context: StepContext) -> Tensor | None:
        """Return which pairs are computed, bool [N]; None if there is no limit."""
        budget = self.budget(scored.num_tokens, scored.open_E)
        if budget is None:
            return None
        device_N = pairs.expert_N // (self.dims.num_experts // self.num_devices)
        affinity_N = value_of_pairs(scored.across_tokens_TE(scored.affinities_TE), pairs)
        if not self.training or self.config.spare == 0:
            return place_in_group(device_N, self.num_devices, None, affinity_N) < budget
        spared_N = self._spared_T(scored.num_tokens, device_N.device, context)[pairs.token_N]
        place_N = place_in_group(device_N, self.num_devices, (~spared_N).long(), affinity_N)
        return (place_N < budget) | spared_N

    def _spared_T(self, num_tokens: int, device: torch.device, context: StepContext) -> Tensor:
        """Return the tokens of this step's spared sequences, bool [T]."""
        sample_B = context.sample_index_B
        sample_B = torch.zeros(1, dtype=torch.int64) if sample_B is None else sample_B
        draw_key = rng.key(context.seed, context.step, 0, "spared sequences")  # layer 0: the same in all
        unit_B = rng.uniform(draw_key, sample_B.to(device), 1, kernels=self.dims.kernels).squeeze(1)
        spared_B = unit_B < self.config.spare
        return spared_B[context.sequence(num_tokens, device)]
