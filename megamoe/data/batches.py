"""This rank's micro batches, in an order that depends on the sample numbers alone."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch.utils.data import Dataset

from megamoe.data.loader import Loader
from megamoe.errors import UserError


def sample_items(
    text: torch.Tensor, eod: int | None, ends: Sequence[int] | np.ndarray = ()
) -> dict[str, torch.Tensor]:
    """Return the items of a sample, like those of Megatron-Core's GPTDataset.

    Args:
        text: the tokens and the one after the last, int64 [S + 1].
        eod: the token that ends a document, for the items of `document_items`; None: no such items.
        ends: as for `document_items`.
    """
    tokens_S, labels_S = text[:-1].contiguous(), text[1:].contiguous()
    if eod is not None:
        return {"tokens": tokens_S, "labels": labels_S, **document_items(tokens_S, eod, ends)}
    return {
        "tokens": tokens_S,
        "labels": labels_S,
        "position_ids": torch.arange(len(tokens_S)),
        "loss_mask": torch.ones(len(tokens_S)),
    }


def document_items(
    tokens_S: torch.Tensor, eod: int, ends: Sequence[int] | np.ndarray = ()
) -> dict[str, torch.Tensor]:
    """Return the items of a sample that depend on its documents; tokens_S: int64.

    ends: positions of further last tokens of documents, which are not `eod`; those outside of the sample have
    no effect.

    An end-of-document token belongs to the document that it ends. `document_start` (int32 [S]): the position
    at which each token's document begins. `position_ids` (int64 [S]): from 0 in each document. `loss_mask`
    (float32 [S]): 0 at each end, as the next token is another document's first.
    """
    place_S = torch.arange(len(tokens_S))
    is_end_S = tokens_S == eod
    if len(ends):
        is_end_S[[end for end in ends if 0 <= end < len(tokens_S)]] = True
    begins_S = is_end_S.roll(1)
    begins_S[:1] = True
    start_S = torch.where(begins_S, place_S, 0).cummax(0).values
    return {
        "position_ids": place_S - start_S,
        "loss_mask": (~is_end_S).float(),
        "document_start": start_S.int(),
    }


Item = dict[str, torch.Tensor]  # a sample, by the names of its tensors
ON_HOST = ("document_start_BS", "lengths_B", "source_lengths_B")  # lengths, which the host reads


@dataclass(frozen=True)
class Batch:
    """One micro batch. B: sequences, S: tokens of a sequence, L: tokens of a source sequence.

    Sequences may end in padding. Fields that begin with source_ are the input of an encoder_decoder's
    encoder. document_start_BS: the position in its sequence at which each token's document begins; padding
    is a document of its own.
    """

    tokens_BS: torch.Tensor  # int64
    labels_BS: torch.Tensor  # int64, the token after each
    position_ids_BS: torch.Tensor  # int64
    loss_mask_BS: torch.Tensor  # float32, 0 where no loss is taken
    document_start_BS: torch.Tensor | None  # int32, always on the CPU; None: documents see each other
    sample_index_B: torch.Tensor  # int64, the global number of each sample
    predicted_P: torch.Tensor | None = None  # int64, the places s * B + b with a loss; None: any may have one
    lengths_B: torch.Tensor | None = None  # int64, on the CPU, tokens before padding; None: no padding
    source_BL: torch.Tensor | None = None  # int64
    source_lengths_B: torch.Tensor | None = None  # int64, on the CPU; given with source_BL

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on `device`, but for lengths and documents, which the host reads."""
        moved = {
            name: tensor.to(device, non_blocking=True)
            for name, tensor in vars(self).items()
            if tensor is not None and name not in ON_HOST
        }
        return replace(self, **moved)

    def repeat(self, times: int) -> "Batch":
        """Return the micro batch repeated: all of its sequences, `times` times."""
        if times == 1:
            return self
        assert self.predicted_P is None and self.lengths_B is None
        tensors = {name: tensor for name, tensor in vars(self).items() if tensor is not None}
        return replace(self, **{name: torch.cat([tensor] * times) for name, tensor in tensors.items()})


def warn(line: str) -> None:
    """Print a warning to the standard error."""
    print(f"warning: {line}", file=sys.stderr, flush=True)


class BatchStream(Iterator[Batch], AbstractContextManager["BatchStream"]):
    """An iterator over one rank's micro batches.

    Its j-th micro batch holds the samples from `start_sample + (j * data_size + data_rank) *
    micro_batch_size` on. Usable as a context manager.

    Args:
        dataset: its items are those of `megamoe.data.datasets.Datasets`.
        start_sample: first sample of the stream, over all ranks.
        workers: loader processes; 0: samples are read in this process.
        report: called with a line when a loader process has died and was replaced.
        make_batch: makes a batch of items and their numbers; default: `stacked`.
    """

    def __init__(
        self,
        dataset: Dataset[dict[str, torch.Tensor]],
        *,
        start_sample: int,
        micro_batch_size: int,
        data_rank: int,
        data_size: int,
        workers: int,
        report: Callable[[str], None] = warn,
        make_batch: "MakeBatch | None" = None,
    ) -> None:
        num_samples, stride = len(dataset), micro_batch_size * data_size  # type: ignore[arg-type]
        self._num_samples, self._start_sample, self._stride = num_samples, start_sample, stride
        self._num_taken = 0
        self._is_closed = False

        def indices_from(number: int) -> Iterator[list[int]]:
            """Yield the sample numbers of each micro batch; end when some rank would have none."""
            start = start_sample + number * stride
            for first in range(start, num_samples - stride + 1, stride):
                own = first + data_rank * micro_batch_size
                yield list(range(own, own + micro_batch_size))

        self._loader: Loader[Batch | str] = Loader(
            _Numbered(dataset),
            indices_from,
            collate=partial(collate, make_batch or stacked),
            workers=workers,
            report=report,
        )

    def __next__(self) -> Batch:
        """Return the next micro batch.

        Raises:
            UserError: if the dataset has run out, on every rank at the same micro batch; if a sample cannot
                be read, on the ranks that need it.
            RuntimeError: if loader processes die again and again, or hang.
            StopIteration: if the stream is closed.
        """
        if self._is_closed:
            raise StopIteration
        batch = next(self._loader, None)
        if isinstance(batch, str):
            raise UserError(batch)
        if batch is None:
            asked = self._start_sample + (self._num_taken + 1) * self._stride
            raise UserError(
                f"data: {asked} samples were asked of a dataset of {self._num_samples}; "
                "lower train.steps or the batch size, or add data"
            )
        self._num_taken += 1
        return batch

    def close(self) -> None:
        """End the loader processes. May be called twice."""
        self._is_closed = True
        self._loader.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Numbered(Dataset[tuple[int, dict[str, torch.Tensor] | str]]):
    """Samples with their numbers. A sample that cannot be read is replaced by the error's message.

    An exception would arrive from a loader process as the text of its traceback.
    """

    def __init__(self, dataset: Dataset[dict[str, torch.Tensor]]) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, dict[str, torch.Tensor] | str]:
        try:
            return index, self._dataset[index]
        except UserError as error:
            return index, str(error)


MakeBatch = Callable[[list[Item], list[int]], Batch]
Made = TypeVar("Made")


def collate(
    make_batch: Callable[[list[Item], list[int]], Made], samples: list[tuple[int, Item | str]]
) -> Made | str:
    """Return the batch of numbered items, or the first message: of an item, or of `make_batch`."""
    items = []
    for _, item in samples:
        if isinstance(item, str):
            return item
        items.append(item)
    try:
        return make_batch(items, [index for index, _ in samples])
    except UserError as error:
        return str(error)


def stacked(items: list[Item], indices: list[int]) -> Batch:
    """Return the batch of items of one length; indices: their numbers in the data."""

    def stack(name: str) -> torch.Tensor:
        return torch.stack([item[name] for item in items])

    return Batch(
        tokens_BS=stack("tokens"),
        labels_BS=stack("labels"),
        position_ids_BS=stack("position_ids"),
        loss_mask_BS=stack("loss_mask"),
        document_start_BS=stack("document_start") if "document_start" in items[0] else None,
        sample_index_B=torch.tensor(indices),
    )


def pair_batch(
    items: list[Item],
    indices: list[int],
    *,
    start: int,
    pad: int = 0,
    multiple: int = 1,
    longest: int | None = None,
) -> Batch:
    """Return the batch of pairs, filled up to the longest source and the longest target.

    items: `source` and `target`, int64 of any lengths above 0; a target ends with its own end token. The
    decoder reads `start` and then the target without its last token, and predicts the target. indices: the
    pairs' numbers in the data. pad: the id of padding, which has no influence. multiple: lengths are filled
    up to a multiple of it, see `shapes.length_multiple`. longest: the most tokens of a side, those for which
    the model has positions; None: any.

    Raises:
        UserError: if a side is empty or too long.
    """
    for item, index in zip(items, indices, strict=True):
        for side in ("source", "target"):
            length = item[side].numel()
            if length == 0:
                raise UserError(f"data: the {side} of pair {index} is empty; remove the pair")
            if longest is not None and length > longest:
                raise UserError(
                    f"data: the {side} of pair {index} has {length} tokens, more than data.sequence_length "
                    f"{longest}; raise it, or leave the pair out"
                )
    sources, targets = ([item[side] for item in items] for side in ("source", "target"))
    shifted = [torch.cat((target.new_tensor([start]), target[:-1])) for target in targets]
    tokens_BS, lengths_B = filled(shifted, pad, multiple)
    labels_BS, _ = filled(targets, pad, multiple)
    source_BL, source_lengths_B = filled(sources, pad, multiple)
    place_S = torch.arange(tokens_BS.shape[1])
    return Batch(
        tokens_BS=tokens_BS,
        labels_BS=labels_BS,
        position_ids_BS=positions(lengths_B, tokens_BS.shape[1]),
        loss_mask_BS=(place_S < lengths_B[:, None]).float(),
        document_start_BS=None,
        sample_index_B=torch.tensor(indices),
        lengths_B=lengths_B,
        source_BL=source_BL,
        source_lengths_B=source_lengths_B,
    )


def positions(lengths_B: torch.Tensor, size: int) -> torch.Tensor:
    """Return the position of each token in its sequence, int64 [B, size]; 0 for padding."""
    place_S = torch.arange(size)
    return torch.where(place_S < lengths_B[:, None], place_S, 0)


def filled(sequences: list[torch.Tensor], pad: int, multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences filled up with `pad`, int64 [B, S], and their lengths, int64 [B]."""
    lengths = [len(sequence) for sequence in sequences]
    size = -(-max(lengths) // multiple) * multiple
    filled_BS = torch.full((len(sequences), size), pad, dtype=torch.int64)
    for row_S, sequence in zip(filled_BS, sequences, strict=True):
        row_S[: len(sequence)] = sequence
    return filled_BS, torch.tensor(lengths)
