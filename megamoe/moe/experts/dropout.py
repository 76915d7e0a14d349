"""Dropout inside the routed experts, drawn for each (token, expert) pair and never for a rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.moe import rng


@dataclass(frozen=True)
class ExpertDropout:
    """The dropout of one micro batch's rows at their experts, in training; inverted scaling.

    Two rates: `output` on what an expert gives back (Xie et al. 2022, MoEC, table 7: "MoE dropout"),
    `activation` after each activation inside it (Fedus et al. 2021, Switch, section 2.4: "expert dropout" at
    the interim feed-forward computation, 0.4 there; MoEC: "MoE activation dropout"). Shared experts have none
    of it.

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
        """[N, H] of experts' outputs -> the same, dropped out."""
        return self._drop(rows_NH, self.output, "expert output dropout")

    def on_activation(self, rows_NF: Tensor, sublayer: int, first_column: int = 0) -> Tensor:
        """[N, F] after the activation of an expert's sub-layer, counted from 1 -> the same, dropped out.

        first_column: the columns' place in the expert's whole FFN.
        """
        return self._drop(rows_NF, self.activation, f"expert activation dropout {sublayer}", first_column)

    def spread(self, place_N: Tensor, num_rows: int) -> "ExpertDropout":
        """The same for rows that stand at place_N among num_rows; what the others draw does not matter."""
        row_M = self.row_N.new_zeros(num_rows).index_copy(0, place_N, self.row_N)
        return replace(self, row_N=row_M)

    def _drop(self, rows_NF: Tensor, rate: float, purpose: str, first_column: int = 0) -> Tensor:
        if rate == 0:
            return rows_NF
        draw_key, columns = self.draw_key(purpose), rows_NF.shape[1]
        unit_NF = rng.uniform(draw_key, self.row_N, columns, first_column, kernels=self.kernels)
        return rows_NF.masked_fill(unit_NF < rate, 0) / (1 - rate)
