"""What softmax and sigmoid score functions share: the temperature, and a bias that balances without a
loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.moe.part import Dims, Example, ScoreFunction, StepContext


class BiasedScoreFunction(ScoreFunction):
    """A score function with an optional bias b [E], fp32, that shifts what is chosen by and never p.

    Without a bias experts are chosen by their scores, which have the order of p and do not round to 1 or 0.
    With a bias they are chosen by p + b in fp32, as in DeepSeek-V3: among experts whose p fp32 rounds to the
    same value, b alone decides.

    After each training step b_i falls by `bias_update` where expert i was wanted more often than the mean
    over the step's whole batch, rises by it where less often, and stays at the mean. Experts that a step's
    mask closed to every token (expert dropout) stay, and are not in the mean. It is a buffer: saved in
    checkpoints, out of reach of gradient and weight decay. After step `bias_until` it stays as it is.

    Source: DeepSeek-V3, section 2.1.2, auxiliary-loss-free load balancing, eq. 16 (u = 0.001,
    and 0 for the last 500 of 14,800 billion tokens).
    """

    monotone = True

    @dataclass
    class Config:
        """temperature: divides the scores. bias_update: u, the bias's change a step; 0: no bias.

        bias_until: the last step at which the bias moves; null: to the end.
        """

        temperature: float = 1.0
        bias_update: float = 0.0
        bias_until: int | None = None

        def __post_init__(self) -> None:
            if not self.temperature > 0:
                raise ValueError("temperature must be positive")
            if not self.bias_update >= 0:
                raise ValueError("bias_update must be at least 0")
            if self.bias_until is not None and not self.bias_update > 0:
                raise ValueError("bias_until needs a bias: set bias_update above 0")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        """Also whether there is a bias."""
        return super().provides(options) | ({"bias"} if options.bias_update > 0 else set())

    @classmethod
    def examples(cls, num_experts: int, num_choices: int) -> list[Example]:
        """Without and with a bias."""
        return [Example(), Example({"bias_update": 0.001})]

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        if config.bias_update > 0:
            self.register_buffer("bias", torch.zeros(dims.num_experts, dtype=torch.float32))

    @property
    def bias_E(self) -> Tensor | None:
        """fp32 [E]; None where bias_update is 0."""
        return self._buffers.get("bias")

    def _cooled(self, scores: Tensor) -> Tensor:
        """The scores over the temperature; at 1 themselves, without a pass over them and one back."""
        return scores if self.config.temperature == 1 else scores / self.config.temperature

    def after_step(self, load_E: Tensor, context: StepContext) -> None:
        """Move the bias of the open experts against their load, int64 [E]."""
        last = self.config.bias_until
        if self.bias_E is not None and (last is None or context.step <= last):
            is_open_E = load_E >= 0
            total = load_E.clamp_min(0).sum()
            above_E = load_E * is_open_E.sum() - total  # in integers: at the mean is at the mean
            self.bias_E.sub_(above_E.sign() * is_open_E, alpha=self.config.bias_update)
