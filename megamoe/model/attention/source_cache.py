"""The encoder's output while a decoder writes: each cross attention computes its keys and values once."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from megatron.core.transformer.attention import CrossAttention
from torch import Tensor, nn

from megamoe.kernels.attention.documents import SourceLengths

Sides = tuple[Tensor, Tensor]


class SourceCache:
    """The encoder's output for B source sequences, and what the cross attentions computed from it.

    It stands where Megatron-Core's blocks hand on the encoder's output as `context`. The decoder's R rows
    belong to the sources in order, the same number of rows to each (the hypotheses of a beam search).

    context_LBH: the encoder's output; under sequence parallelism this rank's part of the L positions.
    lengths: where the sources end; None: they have no padding.
    """

    def __init__(self, context_LBH: Tensor, lengths: SourceLengths | None) -> None:
        self.context_LBH = context_LBH
        self.lengths = lengths
        self._source_R = list(range(context_LBH.shape[1]))
        self._sides: dict[nn.Module, Sides] = {}

    @property
    def num_sources(self) -> int:
        """The number of source sequences B."""
        return self.context_LBH.shape[1]

    def select(self, rows: list[int]) -> None:
        """Go on with these rows of the decoder; a source without rows is dropped.

        Raises:
            ValueError: if the rows of a source do not follow each other, or if sources have different
                numbers of rows.
        """
        sources = [self._source_R[row] for row in rows]
        runs = [(source, len(list(run))) for source, run in groupby(sources)]
        kept = [source for source, _ in runs]
        if len(set(kept)) != len(kept) or len({size for _, size in runs}) > 1:
            raise ValueError(f"rows: expected equally many neighbours for each source, found {sources}")
        size = len(rows) // len(kept)
        self._source_R = [place for place in range(len(kept)) for _ in range(size)]
        if kept == list(range(self.num_sources)):
            return
        index_B = torch.tensor(kept, device=self.context_LBH.device)
        self.context_LBH = self.context_LBH.index_select(1, index_B)
        if self.lengths is not None:
            self.lengths = SourceLengths(self.lengths.visible_B11L.index_select(0, index_B))
        for owner, (key, value) in self._sides.items():
            self._sides[owner] = key.index_select(1, index_B), value.index_select(1, index_B)

    def sides(self, owner: nn.Module, compute: Callable[[Tensor], Sides]) -> Sides:
        """Return the keys and values of an attention, [L, B, heads, D] each; computed at its first call."""
        if owner not in self._sides:
            self._sides[owner] = compute(self.context_LBH)
        return self._sides[owner]


class CachingCrossAttention(CrossAttention):
    """Megatron-Core's cross attention, which also takes a `SourceCache` in the place of its context.

    Rows of the same source become further positions of one sequence, [S, B * K, H] -> [S * K, B, H]: cross
    attention has no order among its queries, so the keys and values need not be repeated for each row.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Any, key_value_states: Any = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output [S, rows, H], bias), as Megatron-Core does."""
        if not isinstance(key_value_states, SourceCache):
            output, bias = super().forward(hidden_states, attention_mask, key_value_states, **options)
            return output, bias
        batch = key_value_states.num_sources
        length, rows, width = hidden_states.shape
        each = rows // batch
        folded = hidden_states.view(length, batch, each, width).transpose(1, 2).flatten(0, 1)
        output, bias = super().forward(folded, key_value_states.lengths, key_value_states, **options)
        unfolded = output.view(length, each, batch, width).transpose(1, 2)
        return unfolded.reshape(length, rows, width), bias

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Any, *arguments: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [S, B, heads, D], keys and values [L, B, heads, D], as Megatron-Core does."""
        if not isinstance(key_value_states, SourceCache):
            sides: tuple[Tensor, Tensor, Tensor] = super().get_query_key_value_tensors(
                hidden_states, key_value_states, *arguments, **options
            )
            return sides
        given = super().get_query_key_value_tensors
        # Megatron-Core computes both sides together; where the keys are known, `linear_q` alone is needed.
        query, _ = self.linear_q(hidden_states)
        size = self.hidden_size_per_attention_head
        query = query.view(*query.shape[:-1], self.num_attention_heads_per_partition, size)
        key, value = key_value_states.sides(self, lambda context: given(hidden_states, context)[1:])
        return query, key, value
