"""Runs an encoder-decoder on targets that grow by a token at a time; the sources are encoded once."""

import torch
from torch import Tensor

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.runner import CachedRunner, PlainRunner, describe_pass
from megamoe.data.batches import filled, positions
from megamoe.model.architectures.encoder_decoder import EncoderDecoder
from megamoe.model.attention.caches import KeyValueCache, SourceCache
from megamoe.moe.context import Padding, SourceTokens


def encoder_decoder_of(trained: TrainedModel) -> EncoderDecoder:
    """Return the model of a session that opens encoder-decoders only."""
    assert isinstance(trained.model, EncoderDecoder)
    return trained.model


class CachedSourceRunner(CachedRunner):
    """Each position of each target is computed once, and so are the cross attentions' keys and values.

    sources: token ids of each source, which may have different lengths. prefix: the tokens with which all
    targets begin. most: the most tokens after it.
    """

    def __init__(self, trained: TrainedModel, sources: list[list[int]], prefix: list[int], most: int) -> None:
        super().__init__(trained, [prefix] * len(sources), most)
        self.sources = sources

    def begin(self) -> Tensor:
        """Encode the sources; return the logits of the targets' first tokens, fp32 [B, vocabulary]."""
        self.encoded = encoded(self.trained, self.sources)
        return super().begin()

    def feed(self, new: list[int], rows: list[int] | None = None) -> Tensor:
        """Append a token to each target that goes on, see `runner.Runner`."""
        if rows is not None:
            self.encoded.select(rows)
        return super().feed(new, rows)

    def _logits(self, tokens_BS: Tensor, position_BS: Tensor, size: int) -> Tensor:
        return _logits(self.trained, tokens_BS, position_BS, size, self.encoded, self.cache)


class PlainSourceRunner(PlainRunner):
    """Whole targets are computed for each token, each by itself, after its source by itself.

    This is the definition, and serves routers for which a token's experts depend on other tokens.
    """

    def __init__(self, trained: TrainedModel, sources: list[list[int]], prefix: list[int]) -> None:
        super().__init__(trained, [prefix] * len(sources))
        self.sources = sources

    def begin(self) -> Tensor:
        """Encode each source; return the logits of the targets' first tokens, fp32 [B, vocabulary]."""
        self.encoded = [encoded(self.trained, [source]) for source in self.sources]
        return super().begin()

    def _logits(self, tokens_BS: Tensor, position_BS: Tensor, size: int, number: int) -> Tensor:
        return _logits(self.trained, tokens_BS, position_BS, size, self.encoded[number], None)


@torch.no_grad()
def encoded(trained: TrainedModel, sources: list[list[int]]) -> SourceCache:
    """Run the encoder on sources, filled up to the longest; collective over all ranks."""
    device, context = trained.world.device, trained.context
    end = trained.vocabulary.eod
    pad = trained.vocabulary.special.pad
    sequences = [torch.tensor(source) for source in sources]
    source_BL, lengths_B = filled(sequences, (end or 0) if pad is None else pad, trained.layout.tensor)
    size = source_BL.shape[1]
    position_BL = positions(lengths_B, size)
    context.sample_index_B = torch.arange(len(sources), device=device)
    context.num_rollouts = 1
    context.source = SourceTokens(
        position_BL.T.reshape(-1).to(device),
        source_BL.T.reshape(-1).to(device),
        Padding.of(lengths_B, size, device),
    )
    model = encoder_decoder_of(trained)
    return model.encoded(source_BL.to(device), position_BL.to(device), lengths_B)


@torch.no_grad()
def _logits(
    trained: TrainedModel,
    tokens_BS: Tensor,
    position_BS: Tensor,
    size: int,
    source: SourceCache,
    cache: KeyValueCache | None,
) -> Tensor:
    """Run the decoder on tokens, those from `size` on padding; collective over all ranks."""
    num_rows, padded = tokens_BS.shape
    position_BS = describe_pass(trained, tokens_BS, position_BS)
    if size < padded:
        trained.context.padding = Padding.of(torch.full((num_rows,), size), padded, tokens_BS.device)
    return encoder_decoder_of(trained).next_logits(tokens_BS, position_BS, source, cache)
