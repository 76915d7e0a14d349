"""Where the documents of a sample begin, read off the tokens that end them."""

import torch


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
