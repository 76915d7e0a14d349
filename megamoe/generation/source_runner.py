"""Runs an encoder-decoder on targets that grow by a token at a time; the sources are encoded once."""

import torch
from torch import Tensor, nn

from megamoe.analysis.trained_model import TrainedModel
from megamoe.data.pairs import filled, positions
from megamoe.model.architectures.encoder_decoder import EncoderDecoder
from megamoe.model.attention.key_value_cache import KeyValueCache
from megamoe.model.attention.source_cache import SourceCache
from megamoe.moe.padding import Padding, SourceTokens


def encoder_decoder_of(trained: TrainedModel) -> EncoderDecoder:
    """Return the model of a session that opens encoder-decoders only."""
    assert isinstance(trained.model, EncoderDecoder)
    return trained.model


class CachedSourceRunner:
    """Each position of each target is computed once, and so are the cross attentions' keys and values.

    sources: token ids of each source, which may have different lengths. prefix: the tokens with which all
    targets begin. most: the most tokens after it.
    """

    def __init__(self, trained: TrainedModel, sources: list[list[int]], prefix: list[int], most: int) -> None:
        self.trained, self.prefix, self.sources = trained, prefix, sources
        self.unit = trained.layout.tensor  # tensor-parallel ranks share a pass's positions evenly
        start_B = torch.zeros(len(sources), dtype=torch.int64, device=trained.world.device)
        self.cache = KeyValueCache(start_B, len(prefix) + most + self.unit)

    def begin(self) -> Tensor:
        """Encode the sources; return the logits of the targets' first tokens, fp32 [B, vocabulary]."""
        self.encoded = encoded(self.trained, self.sources)
        device = self.trained.world.device
        return self._forward(torch.tensor([self.prefix] * len(self.sources), device=device))

    def feed(self, new: list[int], rows: list[int] | None = None) -> Tensor:
        """Append a token to each target that goes on, see `runner.Runner`."""
        if rows is not None:
            self.cache.select(rows)
            self.encoded.select(rows)
        return self._forward(torch.tensor(new, device=self.trained.world.device)[:, None])

    def _forward(self, tokens_BS: Tensor) -> Tensor:
        size = tokens_BS.shape[1]
        padded_BS = nn.functional.pad(tokens_BS, (0, -size % self.unit))
        position_BS = self.cache.positions_BS(padded_BS.shape[1])
        logits_BSV = _logits(self.trained, padded_BS, position_BS, size, self.encoded, self.cache)
        self.cache.advance(size)
        return logits_BSV[:, size - 1, : self.trained.vocabulary.size]


class PlainSourceRunner:
    """Whole targets are computed for each token, each by itself, after its source by itself.

    This is the definition, and serves routers for which a token's experts depend on other tokens.
    """

    def __init__(self, trained: TrainedModel, sources: list[list[int]], prefix: list[int]) -> None:
        self.trained, self.sources = trained, sources
        self.targets = [(number, list(prefix)) for number in range(len(sources))]

    def begin(self) -> Tensor:
        """Encode each source; return the logits of the targets' first tokens, fp32 [B, vocabulary]."""
        self.encoded = [encoded(self.trained, [source]) for source in self.sources]
        return self._all_logits()

    def feed(self, new: list[int], rows: list[int] | None = None) -> Tensor:
        """Append a token to each target that goes on, see `runner.Runner`."""
        chosen = self.targets if rows is None else [self.targets[row] for row in rows]
        self.targets = [
            (number, [*tokens, token]) for (number, tokens), token in zip(chosen, new, strict=True)
        ]
        return self._all_logits()

    def _all_logits(self) -> Tensor:
        device, vocabulary = self.trained.world.device, self.trained.vocabulary.size
        found = []
        for number, tokens in self.targets:
            size = len(tokens)
            padding = -size % self.trained.layout.tensor
            tokens_BS = torch.tensor([tokens + [0] * padding], device=device)
            position_BS = torch.arange(size + padding, device=device)[None]
            logits_BSV = _logits(self.trained, tokens_BS, position_BS, size, self.encoded[number], None)
            found.append(logits_BSV[:, size - 1, :vocabulary])
        return torch.cat(found)


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
    _describe_rows(trained, len(sources))
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
    context, (num_rows, padded) = trained.context, tokens_BS.shape
    _describe_rows(trained, num_rows)
    context.token_ids_T = tokens_BS.T.reshape(-1)
    context.token_index_T = position_BS.T.reshape(-1)
    lengths_B = torch.full((num_rows,), size)
    context.padding = None if size == padded else Padding.of(lengths_B, padded, tokens_BS.device)
    if trained.config.model.position == "learned":  # padding may be beyond the last position
        position_BS = position_BS.clamp_max(trained.config.data.sequence_length - 1)
    return encoder_decoder_of(trained).next_logits(tokens_BS, position_BS, source, cache)


def _describe_rows(trained: TrainedModel, num_rows: int) -> None:
    trained.context.sample_index_B = torch.arange(num_rows, device=trained.world.device)
    trained.context.num_rollouts = 1
