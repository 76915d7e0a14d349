"""The temperature and the balancing bias that softmax and sigmoid score functions share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.moe.part import Dims, Example, ScoreFunction, StepContext


class BiasedScoreFunction(ScoreFunction):
    """A score function with an optional bias b [E], fp32, that shifts the choice of experts and never p.

    Without a bias experts are chosen by their scores, which have the order of p and do not round to 1 or 0.
    With a bias they are chosen by p + b in fp32, as in DeepSeek-V3: if fp32 rounds several p to the same
    value, b alone decides.

    After each training step b_i falls by `bias_update` if expert i was wanted more often than the mean over
    the step's whole batch, and rises by it if less often. At the mean it does not change. Experts that a
    step-wide mask closed (expert dropout) keep their bias and are not part of the mean. The bias is a buffer:
    checkpoints save it, and it has no gradient and no weight decay. After step `bias_until` it is constant.

    Source: DeepSeek-V3, section 2.1.2, auxiliary-loss-free load balancing, eq. 16 (u = 0.001, and 0 for the
    last 500 of 14,800 billion tokens).
    """

    monotone = True

    @dataclass
    class Config:
        """temperature: divides the scores. bias_update: u, the bias's change per step; 0: no bias.
        bias_until: the last step that changes the bias; null: all steps do.
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
        return super().provides(options) | ({"bias"} if options.bias_update > 0 else set())

    @classmethod
    def examples(cls, num_experts: int, num_choices: int) -> list[Example]:
        return [Example(), Example({"bias_update": 0.001})]

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        if config.bias_update > 0:
            self.register_buffer("bias", torch.zeros(dims.num_experts, dtype=torch.float32))

    @property
    def bias_E(self) -> Tensor | None:
        """The bias, fp32 [E]; None if bias_update is 0."""
        return self._buffers.get("bias")

    def _scaled(self, scores: Tensor) -> Tensor:
        """Return the scores divided by the temperature; at 1 the scores themselves, without an operation."""
        return scores if self.config.temperature == 1 else scores / self.config.temperature

    def metrics(self) -> dict[str, Tensor]:
        """Return the range of the bias, max b - min b, if there is one."""
        return {} if self.bias_E is None else {"bias_range": self.bias_E.max() - self.bias_E.min()}

    def after_step(self, load_E: Tensor, context: StepContext) -> None:
        """Move the bias of the open experts against their load, int64 [E]."""
        last = self.config.bias_until
        if self.bias_E is not None and (last is None or context.step <= last):
            is_open_E = load_E >= 0
            total = load_E.clamp_min(0).sum()
            above_E = load_E * is_open_E.sum() - total  # in integers, so that equality is exact
            self.bias_E.sub_(above_E.sign() * is_open_E, alpha=self.config.bias_update)
