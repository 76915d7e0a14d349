"""Batches of pairs of sequences: what an encoder_decoder reads, and what it writes."""

import torch
from torch import Tensor

from megamoe.data.batches import Batch, Item
from megamoe.errors import UserError


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
    up to a multiple of it, the tensor-parallel ranks. longest: the most tokens of a side, those for which the
    model has positions; None: any.

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


def positions(lengths_B: Tensor, size: int) -> Tensor:
    """Return the position of each token in its sequence, int64 [B, size]; 0 for padding."""
    place_S = torch.arange(size)
    return torch.where(place_S < lengths_B[:, None], place_S, 0)


def filled(sequences: list[Tensor], pad: int, multiple: int) -> tuple[Tensor, Tensor]:
    """Return the sequences filled up with `pad`, int64 [B, S], and their lengths, int64 [B]."""
    lengths = [len(sequence) for sequence in sequences]
    size = -(-max(lengths) // multiple) * multiple
    filled_BS = torch.full((len(sequences), size), pad, dtype=torch.int64)
    for row_S, sequence in zip(filled_BS, sequences, strict=True):
        row_S[: len(sequence)] = sequence
    return filled_BS, torch.tensor(lengths)
