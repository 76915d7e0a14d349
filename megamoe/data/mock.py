"""Synthetic tokens for trying a layout or a machine: a noisy Markov chain that a model can learn.

Each token is the one before plus STRIDE (modulo the vocabulary), but one in ten is uniform. Sample `i`
depends on the seed, the set's name and `i` alone, so any rank, worker or resumed run sees the same.
"""

import zlib

import numpy as np
import torch
from torch.utils.data import Dataset

from megamoe.data.batches import sample_items

STRIDE = 7
NOISE = 0.1


class MockDataset(Dataset[dict[str, torch.Tensor]]):
    """A dataset with items like those of Megatron-Core's GPTDataset.

    An item holds `tokens`, `labels`, `position_ids` ([S] int64), `loss_mask` ([S] float32) and, if
    document-aware, `document_start` ([S] int32, the position at which each token's document begins).
    """

    def __init__(
        self,
        name: str,
        num_samples: int,
        *,
        sequence_length: int,
        vocab_size: int,
        eod: int | None,
        seed: int,
    ) -> None:
        """eod: the token that ends a document, for document-aware items; None: no such items."""
        self._name = zlib.crc32(name.encode())
        self._num_samples, self._sequence_length = num_samples, sequence_length
        self._vocab_size, self._eod, self._seed = vocab_size, eod, seed

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = np.random.default_rng([self._seed, self._name, index])
        length = self._sequence_length + 1
        steps = np.where(
            generator.random(length) < NOISE, generator.integers(0, self._vocab_size, length), STRIDE
        )
        steps[0] = generator.integers(0, self._vocab_size)
        text = torch.from_numpy(np.cumsum(steps) % self._vocab_size)
        return sample_items(text, self._eod)
