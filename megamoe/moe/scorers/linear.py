"""`linear`: one product with a learned matrix."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megamoe.kernels.router import scores
from megamoe.moe.part import Dims, StepContext
from megamoe.moe.scorers.common import RowScorer
from megamoe.registry import register


@register("scorer", "linear")
class LinearScorer(RowScorer):
    """s = W x, computed in fp32 whatever the model's dtype; with `bias`, s = W x + b.

    With `jitter` e, in training, x is first multiplied element by element by draws from U(1 - e, 1 + e).
    b starts at 0, and is trained by gradient, unlike the bias of a score function. With `rows`, the extra
    rows_EH is W in fp32, for a loss on the weight: under ZeRO 3 it is whole only here.

    Source: Shazeer et al. 2017 eq. 3; jitter: Fedus et al. 2021 (Switch), appendix C; b: gpt-oss.
    """

    takes_any_dtype = True

    @dataclass
    class Config:
        """jitter: half-width e of the multiplicative input noise; 0: none. bias: whether b is added. rows:
        whether W is shown to losses.
        """

        jitter: float = 0.0
        bias: bool = False
        rows: bool = False

        def __post_init__(self) -> None:
            if not 0 <= self.jitter < 1:
                raise ValueError("jitter must be at least 0 and under 1")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"rows_EH"} if options.rows else set()

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__(config, dims)
        self.bias: nn.Parameter | None = None
        if config.bias:
            self.bias = nn.Parameter(torch.zeros(dims.num_experts))

    def forward(self, hidden_TH: Tensor, context: StepContext) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """[T, H] in any float dtype -> [T, E] fp32, and the extra rows_EH, fp32, with `rows`."""
        if self.training and self.config.jitter > 0:
            unit_TH = self.draws(context, "jitter", hidden_TH, hidden_TH.shape[1])
            hidden_TH = hidden_TH.float() * (1 + self.config.jitter * (2 * unit_TH - 1))
        scores_TE = scores(hidden_TH, self.weight, self.dims.kernels)
        scores_TE = scores_TE if self.bias is None else scores_TE + self.bias.float()
        if not self.config.rows:
            return scores_TE
        # A copy: ZeRO 3 frees the weight after this call.
        return scores_TE, {"rows_EH": self.weight.to(torch.float32, copy=True)}
