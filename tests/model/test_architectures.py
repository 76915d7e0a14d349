"""Encoders and encoder-decoders: their logits are those of torch.nn's layers with the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamoe.config import RunConfig
from megamoe.kernels.attention.documents import Documents, SourceLengths
from megamoe.model.architectures.encoder import Encoder
from megamoe.model.architectures.encoder_decoder import EncoderDecoder
from megamoe.model.architectures.language_model import LanguageModel
from tests.support.model.plain import embedded, plain_decoder, plain_encoder, sinusoids
from tests.support.tiny import VOCABULARY, tiny, tiny_model

PLAIN = ("model.norm=layernorm", "model.activation=gelu", "model.bias=true", "model.init_std=0.3")
DENSE = (*PLAIN, "moe.layers=none", "model.num_layers=2")
ENCODER = ("model.architecture=encoder", "train.objective=masked")
BOTH = ("model.architecture=encoder_decoder", "train.objective=span_corruption", "model.encoder_layers=3")
LENGTHS = torch.tensor([8, 3, 5])
TOKENS = torch.randint(VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(5))
POSITIONS = torch.arange(8).expand(3, 8)
SOURCE = torch.randint(VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(6))
SOURCE_LENGTHS = torch.tensor([4, 7, 1])


def scattered(model: LanguageModel) -> None:
    """Norms and biases that are not ones and zeros."""
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)


def positions_of(model: Encoder | EncoderDecoder, config: RunConfig) -> Tensor:
    if config.model.position == "sinusoidal":
        return sinusoids(config.data.sequence_length, config.model.hidden_size)
    return model.embedding.position_embeddings.weight


def assert_close(found: Tensor, expected: Tensor, lengths_B: Tensor) -> None:
    for row, plain, length in zip(found, expected, lengths_B.tolist(), strict=True):
        torch.testing.assert_close(row[:length], plain[:length], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("position", ["learned", "sinusoidal"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_encoder_is_torchs(one_rank: None, position: str, norm: str) -> None:
    config = tiny(*DENSE, *ENCODER, f"model.position={position}", f"model.norm_position={norm}")
    model = tiny_model(config).eval()
    assert isinstance(model, Encoder)
    scattered(model)
    hidden = embedded(model, TOKENS, positions_of(model, config))
    padded = torch.arange(8) >= LENGTHS[:, None]
    for layer in plain_encoder(model.encoder.layers, config):
        hidden = layer(hidden, src_key_padding_mask=padded)
    if norm == "pre":
        last: Any = model.encoder.final_layernorm
        hidden = functional.layer_norm(hidden, (16,), last.weight, last.bias, config.model.norm_eps)
    expected = hidden @ model.embedding.word_embeddings.weight.T
    found = model.whole_logits(TOKENS, POSITIONS, Documents.of_lengths(LENGTHS, 8))
    assert_close(found, expected, LENGTHS)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_encoder_decoder_is_torchs(one_rank: None, norm: str) -> None:
    config = tiny(*DENSE, *BOTH, "model.position=sinusoidal", f"model.norm_position={norm}")
    model = tiny_model(config).eval()
    assert isinstance(model, EncoderDecoder)
    scattered(model)
    context = embedded(model, SOURCE, sinusoids(8, 16))
    hidden = embedded(model, TOKENS, sinusoids(8, 16))
    padded = torch.arange(7) >= SOURCE_LENGTHS[:, None]
    for layer in plain_encoder(model.encoder.layers, config):
        context = layer(context, src_key_padding_mask=padded)
    if norm == "pre":
        context = model.encoder.final_layernorm(context)
    causal = torch.ones(8, 8, dtype=torch.bool).triu(1)
    for each in plain_decoder(model.decoder.layers, config):
        hidden = each(hidden, context, tgt_mask=causal, memory_key_padding_mask=padded)
    if norm == "pre":
        hidden = model.decoder.final_layernorm(hidden)
    expected = hidden @ model.embedding.word_embeddings.weight.T
    found = model.whole_logits(
        TOKENS,
        POSITIONS,
        SOURCE,
        torch.arange(7).expand(3, 7),
        Documents.of_lengths(LENGTHS, 8),
        Documents.of_lengths(SOURCE_LENGTHS, 7),
        SourceLengths.of(SOURCE_LENGTHS, 7),
    )
    assert_close(found, expected, LENGTHS)


def test_transform_of_the_head(one_rank: None) -> None:
    config = tiny(*DENSE, *ENCODER, "model.head_transform=true")
    model = tiny_model(config).eval()
    assert isinstance(model, Encoder)
    scattered(model)
    plain: Any = model.head.transform
    hidden = model.hidden(TOKENS, POSITIONS).transpose(0, 1)
    hidden = functional.gelu(functional.linear(hidden, plain[0].weight, plain[0].bias))
    hidden = functional.layer_norm(hidden, (16,), plain[2].weight, plain[2].bias, config.model.norm_eps)
    expected = hidden @ model.embedding.word_embeddings.weight.T
    torch.testing.assert_close(model.whole_logits(TOKENS, POSITIONS), expected, rtol=1e-5, atol=1e-5)


def test_scaled_embeddings(one_rank: None) -> None:
    plain, scaled = (
        tiny_model(tiny(*DENSE, *ENCODER, f"model.scale_embeddings={scale}")) for scale in ("false", "true")
    )
    assert isinstance(plain, Encoder) and isinstance(scaled, Encoder)
    given = {"input_ids": TOKENS, "position_ids": POSITIONS}
    torch.testing.assert_close(scaled.embedding(**given), 4 * plain.embedding(**given))


@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
def test_documents_and_padding_do_not_see_each_other(one_rank: None, position: str) -> None:
    """A document gets the logits that it has alone, and whatever else the sequence holds has no influence."""
    model = tiny_model(tiny(*PLAIN, *ENCODER, f"model.position={position}", "moe.layers=none")).eval()
    assert isinstance(model, Encoder)
    start_BS = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5]])
    place_BS = torch.arange(8) - start_BS
    found = model.whole_logits(TOKENS[:1], place_BS, Documents.of(start_BS))
    for first, last in ((0, 3), (3, 5), (5, 8)):
        alone = model.whole_logits(TOKENS[:1, first:last], place_BS[:, first:last])
        torch.testing.assert_close(found[:, first:last], alone, rtol=1e-5, atol=1e-5)
    other = TOKENS[:1].clone()
    other[:, 2] = (other[:, 2] + 1) % VOCABULARY
    changed = model.whole_logits(other, place_BS, Documents.of(start_BS))
    assert not torch.allclose(changed[:, 0], found[:, 0])  # from a later token: attention is bidirectional
    torch.testing.assert_close(changed[:, 3:], found[:, 3:])


def test_numbers_go_on_from_the_encoder_to_the_decoder(one_rank: None) -> None:
    layers = "moe.layers={encoder: {at: [2]}, decoder: {every: 1, at: [], insert_after: []}}"
    model = tiny_model(tiny(*BOTH, layers, "model.num_layers=2"))
    found = {number: layer for number, layer in model.moe_layers()}
    assert list(found) == [2, 4, 5]
    assert [layer.of_source for layer in found.values()] == [True, False, False]
    assert [layer.router.dims.layer for layer in found.values()] == [2, 4, 5]


def test_losses_of_chosen_places_alone(one_rank: None) -> None:
    model = tiny_model(tiny(*PLAIN, *ENCODER, "moe.layers=none")).eval()
    every = model(tokens_BS=TOKENS, position_ids_BS=POSITIONS, labels_BS=TOKENS.flip(0), label_smoothing=0.1)
    place_P = torch.tensor([3, 4, 11, 23])
    found = model(
        tokens_BS=TOKENS,
        position_ids_BS=POSITIONS,
        labels_BS=TOKENS.flip(0),
        label_smoothing=0.1,
        predicted_P=place_P,
    )
    chosen = torch.zeros(24, dtype=torch.bool)
    chosen[place_P] = True
    wanted = torch.where(chosen.view(8, 3).T, every, 0.0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_decoder_with_sinusoidal_positions(one_rank: None) -> None:
    """It has no table to learn, and the order of the tokens matters."""
    model = tiny_model(tiny("model.position=sinusoidal", "moe.layers=none", "model.init_std=0.5")).eval()
    assert not [name for name, _ in model.named_parameters() if "position" in name]
    swapped = TOKENS.clone()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    first, second = (
        model(tokens_BS=words, position_ids_BS=POSITIONS, labels_BS=TOKENS)[:, 4:]
        for words in (TOKENS, swapped)
    )
    assert (first - second).abs().max() > 1e-3
