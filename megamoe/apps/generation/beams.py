"""Beam search with a trained model: what it never writes, and decoders that continue prompts."""

from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import Tensor

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.beam_search import BeamOptions, beam_search
from megamoe.apps.generation.generate import Generated, tokenizer_of
from megamoe.apps.generation.runner import runner_of


def continued(
    trained: TrainedModel,
    prompts: list[list[int]],
    options: BeamOptions,
    max_tokens: int,
    *,
    batch_size: int = 8,
    cached: bool = True,
) -> Iterator[Generated]:
    """Yield the best continuation of each prompt, in order. Collective over all ranks.

    max_tokens, batch_size, cached: as in `generate.generate`. The length penalty counts the new tokens.
    """
    end = trained.vocabulary.eod
    size = batch_size if cached else 1
    for first in range(0, len(prompts), size):
        batch = prompts[first : first + size]
        found = beam_search(
            runner_of(trained, batch, max_tokens, cached),
            [max_tokens] * len(batch),
            options,
            end=-1 if end is None else end,
            forbidden=never_written(trained),
            agree=agreement(trained),
        )
        for prompt, (best, *_) in zip(batch, found, strict=True):
            reason = "end_of_document" if best.tokens[-1] == end else "length"
            yield Generated(prompt, best.tokens, tokenizer_of(trained).decode(best.tokens), reason)


def never_written(trained: TrainedModel) -> list[int]:
    """Return the tokens that are no text: padding, masks, sentinels, tags, and ids that no data has."""
    vocabulary = trained.vocabulary
    known = vocabulary.in_data if vocabulary.in_data > 2 else vocabulary.size  # 2: not known
    unknown = range(known, vocabulary.size)
    return sorted({*vocabulary.special.ids.values(), *unknown} - {vocabulary.eod})


def agreement(trained: TrainedModel) -> Callable[[Tensor], None]:
    """Return what overwrites a tensor with the first rank's: rounding must not make ranks differ."""
    if trained.world.size == 1:
        return lambda tensor: None
    return lambda tensor: dist.broadcast(tensor, src=0)
