"""The items of a sample, and where its documents begin, read off the tokens that end them."""

import torch


def sample_items(text: torch.Tensor, eod: int | None) -> dict[str, torch.Tensor]:
    """Return the items of a sample, like those of Megatron-Core's GPTDataset.

    Args:
        text: the tokens and the one after the last, int64 [S + 1].
        eod: the token that ends a document, for the items of `document_items`; None: no such items.
    """
    tokens_S, labels_S = text[:-1].contiguous(), text[1:].contiguous()
    if eod is not None:
        return {"tokens": tokens_S, "labels": labels_S, **document_items(tokens_S, eod)}
    return {
        "tokens": tokens_S,
        "labels": labels_S,
        "position_ids": torch.arange(len(tokens_S)),
        "loss_mask": torch.ones(len(tokens_S)),
    }


def document_items(tokens_S: torch.Tensor, eod: int) -> dict[str, torch.Tensor]:
    """Return the items of a sample that depend on its documents; tokens_S: int64.

    An end-of-document token belongs to the document that it ends. `document_start` (int32 [S]): the position
    at which each token's document begins. `position_ids` (int64 [S]): from 0 in each document. `loss_mask`
    (float32 [S]): 0 at each end, as the next token is another document's first.
    """
    place_S = torch.arange(len(tokens_S))
    is_end_S = tokens_S == eod
    begins_S = is_end_S.roll(1)
    begins_S[:1] = True
    start_S = torch.where(begins_S, place_S, 0).cummax(0).values
    return {
        "position_ids": place_S - start_S,
        "loss_mask": (~is_end_S).float(),
        "document_start": start_S.int(),
    }
