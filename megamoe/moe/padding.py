"""Micro batches whose sequences end in padding, which an MoE layer does not route."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megamoe.moe.context import StepContext


@dataclass(frozen=True)
class Padding:
    """The places of the tokens that are not padding, among all S * B places of a micro batch.

    place_V: int64, ascending, on the device of the layers. place_on_cpu_V: the same on the CPU, where the
    ranks' shares are counted. num_places: S * B. num_sequences: B.
    """

    place_V: Tensor
    place_on_cpu_V: Tensor
    num_places: int
    num_sequences: int

    @classmethod
    def of(cls, lengths_B: Tensor, size: int, device: torch.device | str = "cpu") -> "Padding":
        """Return the padding of sequences of `size` places.

        lengths_B: integers on the CPU, the tokens of each sequence, which its padding follows. They may leave
        no padding: all ranks must build the same autograd graph, because ZeRO 3 compares the order of their
        modules, in backward and in recomputation too.
        """
        valid_SB = torch.arange(size)[:, None] < lengths_B
        place_V = valid_SB.flatten().nonzero().flatten()
        return cls(place_V.to(device, non_blocking=True), place_V, valid_SB.numel(), len(lengths_B))

    def bounds(self, ranks: int) -> tuple[int, ...]:
        """Return where each rank's tokens begin among the V, and V; ranks have equal shares of the places."""
        edges = torch.arange(ranks + 1) * (self.num_places // ranks)
        return tuple(torch.searchsorted(self.place_on_cpu_V, edges).tolist())

    def own_places(self, rank: int, ranks: int) -> Tensor:
        """Return the places of a rank's tokens among the places of that rank, int64."""
        bounds = self.bounds(ranks)
        return self.place_V[bounds[rank] : bounds[rank + 1]] - rank * (self.num_places // ranks)

    def without(self, context: "StepContext", ranks: int) -> "StepContext":
        """Return the context of the V tokens; `ranks`: over which the micro batch's places are spread."""
        index_T, ids_T, place_V = context.token_index_T, context.token_ids_T, self.place_V
        return replace(
            context,
            token_index_T=place_V if index_T is None else index_T.to(place_V.device)[place_V],
            token_ids_T=None if ids_T is None else ids_T.to(place_V.device)[place_V],
            sequence_T=place_V % self.num_sequences,
            bounds=self.bounds(ranks),
            padding=None,
        )


@dataclass(frozen=True)
class SourceTokens:
    """The tokens of an encoder_decoder's encoder in a micro batch, as `StepContext` holds the decoder's."""

    token_index_T: Tensor
    token_ids_T: Tensor
    padding: Padding | None = None
