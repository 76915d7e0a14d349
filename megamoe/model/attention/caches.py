"""Caches for generation: keys and values of the positions so far, and of the encoder's output."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from megatron.core.transformer.attention import CrossAttention
from torch import Tensor, nn
from torch.nn import functional

from megamoe.kernels.attention.documents import SourceLengths
from megamoe.kernels.attention.rotary import Rotary, apply_rotary_at
from megamoe.kernels.attention.variants import Variant, masked_attention
from megamoe.kernels.choice import Kernels


class KeyValueCache:
    """Keys and values of B sequences of different lengths, for every attention of a model.

    All sequences end in the same slot: a shorter one begins later, and the slots before are padding that
    nothing sees. It stands where Megatron-Core's blocks hand on their attention mask, as `Documents` does.
    A forward pass with it takes the next S slots; `advance` then keeps them.

    start_B: int64, the slot of each sequence's first token. capacity: slots. length: slots kept so far.
    """

    def __init__(self, start_B: Tensor, capacity: int) -> None:
        self.start_B = start_B
        self.capacity = capacity
        self.length = 0
        self._key_values: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def positions_BS(self, size: int) -> Tensor:
        """Return the positions of the next `size` slots in their sequences, int64; 0 for padding."""
        slot_S = torch.arange(self.length, self.length + size, device=self.start_B.device)
        return (slot_S - self.start_B[:, None]).clamp_min(0)

    def rotated(self, heads_SBND: Tensor, rotary: Rotary, kernels: Kernels) -> Tensor:
        """Rotate the heads of the next S slots by their positions in their sequences, [S, B, heads, D]."""
        place_SB = self.positions_BS(len(heads_SBND)).T
        return apply_rotary_at(heads_SBND, place_SB, self.capacity, rotary, kernels)

    def advance(self, size: int) -> None:
        """Keep the first `size` slots of the last forward pass; the next one overwrites the others."""
        self.length += size

    def select(self, rows: list[int]) -> None:
        """Go on with these of the sequences; they may be fewer, more, or some of them several times."""
        if rows == list(range(len(self.start_B))):
            return
        row_R = torch.tensor(rows, device=self.start_B.device)
        self.start_B = self.start_B[row_R]
        for owner, both in self._key_values.items():
            key, value = (self._rows_of(each, row_R) for each in both)
            self._key_values[owner] = key, value

    def _rows_of(self, heads: Tensor, row_R: Tensor) -> Tensor:
        chosen = heads.new_zeros(self.capacity, len(row_R), *heads.shape[2:])
        chosen[: self.length] = heads[: self.length].index_select(1, row_R)
        return chosen

    def attend(
        self,
        owner: nn.Module,
        query_SBND: Tensor,
        key_SBGD: Tensor,
        value_SBGD: Tensor,
        rotary: Rotary | None,
        scale: float | None,
        variant: Variant,
        kernels: Kernels,
    ) -> Tensor:
        """Compute `causal_attention` of the next S slots over them and those kept; return [S, B, N * D].

        owner: the attention whose keys and values these are.

        Raises:
            ValueError: if the slots are beyond the capacity.
        """
        size, batch = query_SBND.shape[:2]
        end = self.length + size
        if end > self.capacity:
            raise ValueError(f"a key/value cache of {self.capacity} slots was given slot {end}")
        if rotary is not None:
            query_SBND = self.rotated(query_SBND, rotary, kernels)
            key_SBGD = self.rotated(key_SBGD, rotary, kernels)
        keys, values = self._kept(owner, key_SBGD, value_SBGD)
        keys[self.length : end], values[self.length : end] = key_SBGD, value_SBGD
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query_SBND, keys[:end], values[:end]))
        visible = self._visible(size, variant.window)
        if not variant.only_window:
            output_BNSD = masked_attention(query, key, value, visible, scale, variant)
        else:
            shares = query.shape[1] != key.shape[1]
            output_BNSD = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=visible, scale=scale, enable_gqa=shares
            )
        return output_BNSD.permute(2, 0, 1, 3).reshape(size, batch, -1)

    def _kept(self, owner: nn.Module, key_SBGD: Tensor, value_SBGD: Tensor) -> tuple[Tensor, Tensor]:
        if owner not in self._key_values:
            key, value = (each.new_zeros(self.capacity, *each.shape[1:]) for each in (key_SBGD, value_SBGD))
            self._key_values[owner] = key, value
        return self._key_values[owner]

    def _visible(self, size: int, window: int | None) -> Tensor:
        """Return which slots each of the next `size` slots sees, bool [B, 1, size, slots]."""
        slot_L = torch.arange(self.length + size, device=self.start_B.device)
        own_S1 = slot_L[self.length :, None]
        seen = (slot_L <= own_S1) & (slot_L >= self.start_B[:, None, None])
        if window is not None:
            seen &= slot_L > own_S1 - window
        return (seen | (slot_L == own_S1))[:, None]  # padding sees itself: a row of nothing would be NaN


KeyValue = tuple[Tensor, Tensor]


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
        self._key_values: dict[nn.Module, KeyValue] = {}

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
        for owner, (key, value) in self._key_values.items():
            self._key_values[owner] = key.index_select(1, index_B), value.index_select(1, index_B)

    def key_value(self, owner: nn.Module, compute: Callable[[Tensor], KeyValue]) -> KeyValue:
        """Return the keys and values of an attention, [L, B, heads, D] each; computed at its first call."""
        if owner not in self._key_values:
            self._key_values[owner] = compute(self.context_LBH)
        return self._key_values[owner]


class CachingCrossAttention(CrossAttention):
    """Megatron-Core's cross attention, which also takes a `SourceCache` in place of its context.

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
            return super().get_query_key_value_tensors(hidden_states, key_value_states, *arguments, **options)
        given = super().get_query_key_value_tensors
        # Megatron-Core computes queries, keys and values together; where the keys are known, `linear_q`
        # alone is needed.
        query, _ = self.linear_q(hidden_states)
        size = self.hidden_size_per_attention_head
        query = query.view(*query.shape[:-1], self.num_attention_heads_per_partition, size)
        key, value = key_value_states.key_value(self, lambda context: given(hidden_states, context)[1:])
        return query, key, value
