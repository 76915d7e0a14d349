"""Dropout inside the routed experts, drawn for each (token, expert) pair and independent of the rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.moe import rng


@dataclass(frozen=True)
class ExpertDropout:
    """Dropout of one micro batch's rows at their experts, in training; kept values are scaled up.

    `output` is the rate on an expert's output (Xie et al. 2022, MoEC, table 7: "MoE dropout"). `activation`
    is the rate after each activation inside the expert (Fedus et al. 2021, Switch, section 2.4: "expert
    dropout" at the interim feed-forward computation, 0.4 there; MoEC: "MoE activation dropout"). Shared
    experts have neither.

    row_N: int64, each row's number, which follows from its token and expert alone, so that the masks are the
    same whichever rank holds the expert, and when a block is recomputed. draw_key: from a purpose to the key
    of this step's draws in this layer. kernels: those of the draws.
    """

    output: float
    activation: float
    row_N: Tensor
    draw_key: Callable[[str], int]
    kernels: Kernels = DEFAULT_KERNELS

    def on_output(self, rows_NH: Tensor) -> Tensor:
        """Apply dropout to the experts' outputs, [N, H]."""
        return self._drop(rows_NH, self.output, "expert output dropout")

    def on_activation(self, rows_NF: Tensor, sublayer: int, first_column: int = 0) -> Tensor:
        """Apply dropout after the activation of an expert's sub-layer (counted from 1), [N, F].

        first_column: the index of the first column in the expert's whole FFN.
        """
        return self._drop(rows_NF, self.activation, f"expert activation dropout {sublayer}", first_column)

    def spread(self, place_N: Tensor, num_rows: int) -> "ExpertDropout":
        """Return the dropout for num_rows rows, with these rows at place_N; the draws of the others do not
        matter.
        """
        row_M = self.row_N.new_zeros(num_rows).index_copy(0, place_N, self.row_N)
        return replace(self, row_N=row_M)

    def _drop(self, rows_NF: Tensor, rate: float, purpose: str, first_column: int = 0) -> Tensor:
        if rate == 0:
            return rows_NF
        draw_key, columns = self.draw_key(purpose), rows_NF.shape[1]
        unit_NF = rng.uniform(draw_key, self.row_N, columns, first_column, kernels=self.kernels)
        return rows_NF.masked_fill(unit_NF < rate, 0) / (1 - rate)
