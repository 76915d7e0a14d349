"""Runs a trained model on growing sequences, with a key/value cache.

Decoders continue prompts. An encoder-decoder encodes its sources once, and its targets grow.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.config.layer_kinds import kinds
from megamoe.data.batches import filled, positions
from megamoe.errors import UserError
from megamoe.model.architectures.encoder_decoder import EncoderDecoder
from megamoe.model.attention.caches import KeyValueCache, SourceCache
from megamoe.moe.capabilities import capabilities
from megamoe.moe.context import MicroBatch, Padding
from megamoe.moe.part import Part

CHUNK = 256  # positions of a prompt that are computed at a time, so that few logits are held

# Gets the position of each token of a forward pass after it; see `experts.ExpertRecord.take`.
Observer = Callable[[Tensor], None]


class Runner:
    """A batch of sequences that grow by one token at a time. Each position is computed once.

    observe: called after each forward pass with the positions of its tokens, int64 [B, S], -1 for what is no
    token of a sequence. sources: of an encoder-decoder: the token ids of each sequence's source.
    """

    def __init__(
        self,
        trained: TrainedModel,
        prompts: list[list[int]],
        max_tokens: int,
        observe: Observer | None = None,
        sources: list[list[int]] | None = None,
    ) -> None:
        self.trained, self.observe, self.sources = trained, observe, sources
        self.encoded: SourceCache | None = None
        self.unit = trained.layout.tensor  # tensor-parallel ranks share a pass's positions evenly
        longest = max(map(len, prompts))
        device = trained.world.device
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        self.prompts_BS = torch.tensor(rows, device=device)
        start_B = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        self.cache = KeyValueCache(start_B, longest + max_tokens + self.unit)

    def begin(self) -> Tensor:
        """Compute the prompts; return the logits of the tokens after them, fp32 [B, vocabulary]."""
        if self.sources is not None:
            self.encoded = encoded(self.trained, self.sources)
        chunk = -(-CHUNK // self.unit) * self.unit
        for tokens_BS in self.prompts_BS.split(chunk, dim=1):
            logits_BV = self._forward(tokens_BS)
        return logits_BV

    def feed(self, new: list[int], rows: list[int] | None = None) -> Tensor:
        """Append a token to each sequence; return the logits of the next ones, fp32 [B, vocabulary].

        rows: the sequences that go on, which may be fewer, more, or some several times; `new` has a token for
        each of them. None: all.
        """
        if rows is not None:
            self.cache.select(rows)
            if self.encoded is not None:
                self.encoded.select(rows)
        return self._forward(torch.tensor(new, device=self.prompts_BS.device)[:, None])

    def _forward(self, tokens_BS: Tensor) -> Tensor:
        size = tokens_BS.shape[1]
        padded_BS = nn.functional.pad(tokens_BS, (0, -size % self.unit))
        position_BS = self.cache.positions_BS(padded_BS.shape[1])
        logits_BSV = _logits(self.trained, padded_BS, position_BS, size, self.encoded, self.cache)
        if self.observe is not None:
            slot_S = torch.arange(self.cache.length, self.cache.length + padded_BS.shape[1])
            is_token_BS = (slot_S >= self.cache.start_B.cpu()[:, None]) & (slot_S < self.cache.length + size)
            self.observe(torch.where(is_token_BS, position_BS.cpu(), -1))
        self.cache.advance(size)
        return logits_BSV[:, size - 1, : self.trained.vocabulary.size]


def describe_pass(trained: TrainedModel, tokens_BS: Tensor, position_BS: Tensor) -> Tensor:
    """Set the layers' context for a pass without padding; return the positions for the embedding."""
    context = trained.context
    position_T = position_BS.T.reshape(-1)
    samples_B = torch.arange(len(tokens_BS), device=tokens_BS.device)
    context.batch = MicroBatch(position_T, tokens_BS.T.reshape(-1), position_T, samples_B)
    if trained.config.model.position != "learned":
        return position_BS
    # Padding at the end may be beyond the last position.
    return position_BS.clamp_max(trained.config.data.sequence_length - 1)


@torch.no_grad()
def _logits(
    trained: TrainedModel,
    tokens_BS: Tensor,
    position_BS: Tensor,
    size: int,
    source: SourceCache | None,
    cache: KeyValueCache,
) -> Tensor:
    """Run the decoder on tokens, those from `size` on padding, [B, S, words]; collective over all ranks."""
    num_rows, padded = tokens_BS.shape
    position_BS = describe_pass(trained, tokens_BS, position_BS)
    if source is None:
        return trained.decoder.whole_logits(tokens_BS, position_BS, cache)
    if size < padded:
        padding = Padding.of(torch.full((num_rows,), size), padded, tokens_BS.device)
        trained.context.batch = replace(trained.context.batch, padding=padding)
    return encoder_decoder_of(trained).next_logits(tokens_BS, position_BS, source, cache)


class KeepAll(Part):
    """Stands for a router's capacity, and drops nothing."""

    def forward(self, *unused: object) -> None:
        """Return None: every pair is kept."""


def neighbours(trained: TrainedModel) -> list[str]:
    """Return why a token's output depends on later tokens or other sequences, as parts of a sentence.

    Empty: it does not, and sequences of a batch do not influence each other.
    """
    reasons, layers = [], dict(trained.model.moe_layers())
    for kind in kinds(trained.config):
        router, key = kind.moe.router, kind.place("moe.router.capacity")
        has_capacity = any(not isinstance(layers[number].router.capacity, KeepAll) for number in kind.layers)
        if has_capacity and "dropless" not in capabilities(router.capacity):
            reasons.append(f"{key} {router.capacity.name} drops pairs by all tokens of a sequence")
        reasons += [
            f"the {part.kind} {part.name} lets a token's experts depend on other tokens"
            for part in (router.scorer, *router.masks, router.score_function, router.selector)
            if kind.layers and "over_tokens" in capabilities(part)
        ]
    return list(dict.fromkeys(reasons))


def leave_capacity_out(trained: TrainedModel) -> list[str]:
    """Let no router's capacity drop pairs by the other tokens of a batch; return lines for the user."""
    lines, layers = [], dict(trained.model.moe_layers())
    for kind in kinds(trained.config):
        capacity = kind.moe.router.capacity
        if not kind.layers or "dropless" in capabilities(capacity):
            continue
        for number in kind.layers:
            layers[number].router.capacity = KeepAll(None, layers[number].router.dims)
        lines.append(
            f"{kind.place('moe.router.capacity')} {capacity.name} would drop pairs by the other tokens of a "
            "batch, and is left out"
        )
    return lines


def check_cache(trained: TrainedModel) -> None:
    """Refuse a model that cannot compute each position of a sequence once.

    Raises:
        UserError: with the reasons.
    """
    reasons = neighbours(trained)
    if problem := trained.model.problem_with_cache():
        reasons.append(problem)
    if reasons:
        raise UserError(
            f"{trained.path}: no token can be computed before those that follow it: {'; '.join(reasons)}; "
            "override that, such as moe.router.selector=top_k or model.backend=torch"
        )


def encoder_decoder_of(trained: TrainedModel) -> EncoderDecoder:
    """Return the model of a session that opens encoder-decoders only."""
    assert isinstance(trained.model, EncoderDecoder)
    return trained.model


@torch.no_grad()
def encoded(trained: TrainedModel, sources: list[list[int]]) -> SourceCache:
    """Run the encoder on sources, filled up to the longest; collective over all ranks."""
    device, context = trained.world.device, trained.context
    sequences = [torch.tensor(source) for source in sources]
    source_BL, lengths_B = filled(sequences, trained.vocabulary.pad, trained.layout.tensor)
    size = source_BL.shape[1]
    position_BL = positions(lengths_B, size)
    position_T = position_BL.T.reshape(-1).to(device)
    source = MicroBatch(
        position_T,
        source_BL.T.reshape(-1).to(device),
        position_T,
        torch.arange(len(sources), device=device),
        padding=Padding.of(lengths_B, size, device),
    )
    context.batch = MicroBatch(source=source)
    model = encoder_decoder_of(trained)
    return model.encoded(source_BL.to(device), position_BL.to(device), lengths_B)
