"""The keys and values of the positions so far, so that generation computes each position once."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.kernels.attention.rotary import Rotary, turn_heads_at
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
        self._sides: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def positions_BS(self, size: int) -> Tensor:
        """Return the positions of the next `size` slots in their sequences, int64; 0 for padding."""
        slot_S = torch.arange(self.length, self.length + size, device=self.start_B.device)
        return (slot_S - self.start_B[:, None]).clamp_min(0)

    def turned(self, heads_SBND: Tensor, rotary: Rotary, kernels: Kernels) -> Tensor:
        """Turn the heads of the next S slots by their positions in their sequences, [S, B, heads, D]."""
        place_SB = self.positions_BS(len(heads_SBND)).T
        return turn_heads_at(heads_SBND, place_SB, self.capacity, rotary, kernels)

    def advance(self, size: int) -> None:
        """Keep the first `size` slots of the last forward pass; the next one overwrites the others."""
        self.length += size

    def select(self, rows: list[int]) -> None:
        """Go on with these of the sequences; they may be fewer, more, or some of them several times."""
        if rows == list(range(len(self.start_B))):
            return
        row_R = torch.tensor(rows, device=self.start_B.device)
        self.start_B = self.start_B[row_R]
        for owner, sides in self._sides.items():
            key, value = (self._rows_of(side, row_R) for side in sides)
            self._sides[owner] = key, value

    def _rows_of(self, side: Tensor, row_R: Tensor) -> Tensor:
        chosen = side.new_zeros(self.capacity, len(row_R), *side.shape[2:])
        chosen[: self.length] = side[: self.length].index_select(1, row_R)
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
            query_SBND = self.turned(query_SBND, rotary, kernels)
            key_SBGD = self.turned(key_SBGD, rotary, kernels)
        keys, values = self._kept(owner, key_SBGD, value_SBGD)
        keys[self.length : end], values[self.length : end] = key_SBGD, value_SBGD
        query, key, value = (side.permute(1, 2, 0, 3) for side in (query_SBND, keys[:end], values[:end]))
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
        if owner not in self._sides:
            key, value = (side.new_zeros(self.capacity, *side.shape[1:]) for side in (key_SBGD, value_SBGD))
            self._sides[owner] = key, value
        return self._sides[owner]

    def _visible(self, size: int, window: int | None) -> Tensor:
        """Return which slots each of the next `size` slots sees, bool [B, 1, size, slots]."""
        slot_L = torch.arange(self.length + size, device=self.start_B.device)
        own_S1 = slot_L[self.length :, None]
        seen = (slot_L <= own_S1) & (slot_L >= self.start_B[:, None, None])
        if window is not None:
            seen &= slot_L > own_S1 - window
        return (seen | (slot_L == own_S1))[:, None]  # padding sees itself: a row of nothing would be NaN
