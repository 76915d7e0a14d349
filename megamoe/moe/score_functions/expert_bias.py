"""The temperature and the balancing bias that softmax and sigmoid score functions share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe.part import Dims, ScoreFunction, StepContext
from megamoe.registry import get_part


class BiasedScoreFunction(ScoreFunction):
    """A score function with an optional bias b [E], fp32, that shifts the choice of experts and never p.

    Without a bias experts are chosen by their scores, which have the order of p and do not round to 1 or 0.
    With a bias they are chosen by p + b in fp32, as in DeepSeek-V3: if fp32 rounds several p to the same
    value, b alone decides.

    After each training step b_i falls by `bias_update` if expert i was wanted more often than the mean over
    the step's whole batch, and rises by it if less often. At the mean it does not change. Experts that a
    step-wide mask closed (expert dropout) keep their bias and are not part of the mean. The bias is a buffer:
    checkpoints save it, and it has no gradient and no weight decay. After step `bias_until` it is constant.

    With `mean_experts` K_e, beside experts without computation (`moe.zero_experts`), the bias of those stays
    0, and that of each of the E others changes in proportion: b_i += u (K_e / (K E) - n_i / sum_j n_j), K the
    experts of a token and n_i the load. At rest, K_e of a token's K experts compute on average.

    Source: DeepSeek-V3, section 2.1.2, auxiliary-loss-free load balancing, eq. 16 (u = 0.001, and 0 for the
    last 500 of 14,800 billion tokens); `mean_experts`: LongCat-Flash (Meituan 2025), eq. 2.
    """

    monotone = True

    @dataclass
    class Config:
        """temperature: divides the scores. bias_update: u, the bias's change per step; 0: no bias.
        bias_until: the last step that changes the bias; null: all steps do. mean_experts: K_e, the mean
        number of a token's experts that compute.
        """

        temperature: float = 1.0
        bias_update: float = 0.0
        bias_until: int | None = None
        mean_experts: float | None = None

        def __post_init__(self) -> None:
            if not self.temperature > 0:
                raise ValueError("temperature must be positive")
            if not self.bias_update >= 0:
                raise ValueError("bias_update must be at least 0")
            if self.bias_until is not None and not self.bias_update > 0:
                raise ValueError("bias_until needs a bias: set bias_update above 0")
            if self.mean_experts is not None and not self.bias_update > 0:
                raise ValueError("mean_experts is held by a bias: set bias_update above 0")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        held = {"mean_experts"} if options.mean_experts is not None else set()
        return super().provides(options) | ({"bias"} if options.bias_update > 0 else set()) | held

    @classmethod
    def held_mean(cls, options: Config) -> float | None:
        return options.mean_experts

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        why = "since mean_experts is a share of a token's experts"
        return {} if options.mean_experts is None else {"fixed_count": why}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        zero, held = moe.zero_experts.total, options.mean_experts
        if held is not None and zero == 0:
            raise ValueError(
                f"mean_experts is {held:g}, but every expert computes; set moe.zero_experts, or leave it out"
            )
        if zero and options.bias_update > 0 and held is None:
            raise ValueError(
                f"the bias would give {zero} experts that compute nothing (moe.zero_experts) the load of the "
                "others; set mean_experts to the mean number of a token's experts that compute"
            )
        chosen = get_part("selector", moe.router.selector.name).wanted(
            moe.router.selector.options, moe.num_experts
        )
        if held is not None and not 0 < held < chosen:
            raise ValueError(f"mean_experts is {held:g}, expected more than 0 and less than {chosen}, the k")

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        if config.bias_update > 0:
            self.register_buffer("bias", torch.zeros(dims.num_experts, dtype=torch.float32))

    @property
    def bias_E(self) -> Tensor | None:
        """The bias, fp32 [E]; None if bias_update is 0."""
        return self._buffers.get("bias")

    @property
    def small_slope(self) -> float | None:
        return 1 / self.config.temperature if self.monotone else None

    def _scaled(self, scores: Tensor) -> Tensor:
        """Return the scores divided by the temperature; at 1 the scores themselves, without an operation."""
        return scores if self.config.temperature == 1 else scores / self.config.temperature

    def metrics(self) -> dict[str, Tensor]:
        """Return the range of the bias, max b - min b, if there is one."""
        return {} if self.bias_E is None else {"bias_range": self.bias_E.max() - self.bias_E.min()}

    def after_step(self, load_E: Tensor, context: StepContext) -> None:
        """Move the bias of the open experts against their load, int64 [E]."""
        last = self.config.bias_until
        if self.bias_E is None or not (last is None or context.step <= last):
            return
        if self.config.mean_experts is not None and self.dims.num_zero:
            self._hold_mean(load_E)
        else:
            is_open_E = load_E >= 0
            total = load_E.clamp_min(0).sum()
            above_E = load_E * is_open_E.sum() - total  # in integers, so that equality is exact
            self.bias_E.sub_(above_E.sign() * is_open_E, alpha=self.config.bias_update)

    def _hold_mean(self, load_E: Tensor) -> None:
        """Move the bias of the experts that compute towards their share of all pairs."""
        assert self.bias_E is not None
        real = self.dims.num_experts - self.dims.num_zero
        share = self.config.mean_experts / (self.dims.num_choices * real)
        total = load_E.sum().clamp_min(1)
        self.bias_E[:real] += self.config.bias_update * (share - load_E[:real] / total)
