"""Batches of full sequences. What of a real batch is padding or a document's start depends on the data."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megamoe.data.batches import Batch
from megamoe.kernels.attention.documents import Documents, SourceLengths
from megamoe.moe.padding import Padding
from megamoe.train.resolved import ResolvedRun


def sample_batch(run: ResolvedRun) -> Batch:
    """Return a batch whose shapes are those of training; of other objectives than text, of real samples."""
    config = run.config
    size = config.train.micro_batch_size
    if config.model.architecture == "decoder":
        tokens_BS = torch.zeros((size, config.data.sequence_length), dtype=torch.int64)
        sample_B = torch.zeros(size, dtype=torch.int64)
        return Batch(tokens_BS, tokens_BS, tokens_BS, torch.ones(tokens_BS.shape), None, sample_B)
    samples = run.objective.datasets(train_samples=size, validation_samples=0).train
    numbers = list(range(size))
    return run.objective.make_batch([samples[number] for number in numbers], numbers)


def without_values(batch: Batch) -> Batch:
    """Return a batch of the same shapes and dtypes, for the fake mode that is active."""
    values: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    values["document_start_BS"] = None
    for name, value in values.items():
        values[name] = value if value is None else torch.zeros(value.shape, dtype=value.dtype)
    return Batch(**values)


@contextmanager
def full_sequences() -> Iterator[None]:
    """Inside, sequences that may end in padding have none, and the lengths of sequences are not read.

    As in a real run, an MoE layer selects the tokens that are not padding, which are all.
    """

    def padding(lengths_B: Tensor, size: int, device: torch.device | str = "cpu") -> Padding:
        places = size * len(lengths_B)
        place_V = torch.arange(places)
        return Padding(place_V.to(device, non_blocking=True), place_V, places, len(lengths_B))

    def bounds(self: Padding, ranks: int) -> tuple[int, ...]:
        return tuple(range(0, self.num_places + 1, self.num_places // ranks))

    with ExitStack() as stack:
        stack.enter_context(patch.object(Padding, "of", padding))
        stack.enter_context(patch.object(Padding, "bounds", bounds))
        for kind, name in ((Documents, "of_lengths"), (SourceLengths, "of")):
            stack.enter_context(patch.object(kind, name, lambda lengths_B, size, device="cpu": None))
        yield
