"""Builds the model that the configuration describes, of the architecture that it names."""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_block import TransformerBlock

from megamoe.compat.megatron_compat import patch_current_device_for_cpu, set_random_tracker
from megamoe.compat.torch_compat import seed_torch
from megamoe.config.mup import Scaling
from megamoe.config.schema import RunConfig
from megamoe.config.shapes import Stack, padded_vocab_size, stacks
from megamoe.kernels.choice import Kernels
from megamoe.model.architectures.decoder import GPT, Decoder
from megamoe.model.architectures.encoder import Encoder
from megamoe.model.architectures.encoder_decoder import EncoderDecoder
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.attention.context_parallel import ContextShard
from megamoe.model.attention.core import BlockConfig
from megamoe.model.attention.rotary import rotary_of, set_rotary_frequencies
from megamoe.model.block_specs import BlockMaker, MoEFactory, init_methods
from megamoe.model.embedding import (
    Built,
    adapt_embedding,
    build_embedding,
    embedding_first,
    megatron_position,
)
from megamoe.model.heads.labels import label_head
from megamoe.model.heads.multi_token_prediction import MultiTokenPrediction, PredictionDepth
from megamoe.model.heads.vocabulary import Head
from megamoe.model.modules import choose_modules
from megamoe.model.scales import change_logits


class OneStream(CudaRNGStatesTracker):
    """Megatron-Core's tracker of random states, without states of its own.

    building: the model is being built. Its weights are drawn outside of `fork`, as Megatron-Core draws on the
    CPU, so `fork` leaves the random state alone. Transformer Engine enters it for weights that it does not
    draw, and the weights after these would depend on model.backend.
    """

    def __init__(self, building: bool = False) -> None:
        super().__init__()
        self._building = building

    def is_initialized(self) -> bool:
        """Always true."""
        return True

    @contextmanager
    def fork(self, name: Any = None) -> Iterator[None]:
        """Context in which each tensor-parallel rank draws separately; afterwards all ranks have the same
        state.
        """
        if self._building:
            yield
            return
        seed = int(torch.randint(2**62, (1,), device="cpu")) + get_tensor_model_parallel_rank()
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):
            seed_torch(seed)
            yield


def use_one_stream(building: bool = False) -> None:
    """Make Megatron-Core's modules use this tracker."""
    set_random_tracker(OneStream(building))


def build_model(
    config: RunConfig,
    vocab_size: int,
    make_moe_layer: MoEFactory,
    kernels: Kernels,
    built: Built | None = None,
    context: dist.ProcessGroup | None = None,
) -> LanguageModel:
    """Build the model on the CPU in fp32, from `config.seed` alone.

    vocab_size: before padding. make_moe_layer: builds a block's MoE layer, of a class that the caller
    chooses. kernels: of all its passes. built: called with the embedding and with each block as soon as it is
    built, before the next one is; it may change their weights, and must not draw from torch's random state.
    context: the ranks that share the sequences of a micro batch. torch.distributed and Megatron-Core's
    parallel state must be initialised.
    """
    patch_current_device_for_cpu()
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    seed_torch(config.seed)
    use_one_stream(building=True)
    padded = padded_vocab_size(vocab_size, config.model.vocab_multiple)
    init = init_methods(config.model, config.seed)
    ready = built or (lambda prefix, module: None)
    shard = None if context is None else ContextShard.of(context)
    modules = choose_modules(config, kernels)
    maker = BlockMaker(config, modules, padded, make_moe_layer, kernels, init, ready, shard)
    make = {"decoder": _decoder, "encoder": _encoder, "encoder_decoder": _encoder_decoder}
    model: LanguageModel = make[config.model.architecture](maker)
    use_one_stream()
    return model


def _decoder(maker: BlockMaker) -> GPT:
    config, model = maker.config, maker.config.model
    stack, *further = stacks(config)
    transformer = maker.transformer(stack.num_layers)

    def ready(embedding: LanguageModelEmbedding) -> None:
        adapt_embedding(embedding, model)
        maker.built("model.embedding.", embedding)

    with embedding_first(ready):
        decoder = Decoder(
            transformer,
            maker.specs(stack, transformer),
            vocab_size=maker.vocab_size,
            max_sequence_length=config.data.sequence_length,
            parallel_output=True,
            share_embeddings_and_output_weights=model.tie_embeddings,
            position_embedding_type=megatron_position(model, transformer),
        )
    change_logits(decoder.output_layer, model)
    if model.mup is not None and not model.tie_embeddings:
        # Megatron-Core draws it as a hidden weight; muP's output layer starts with the std of the base.
        decoder.output_layer.weight.data.div_(Scaling.of(model).hidden_std)
    if decoder.position_embedding_type == "rope":
        set_rotary_frequencies(decoder, rotary_of(model))
    return GPT(decoder, _prediction(maker, further[0], transformer) if further else None)


def _prediction(maker: BlockMaker, stack: Stack, transformer: BlockConfig) -> MultiTokenPrediction:
    """Return the blocks of multi-token prediction, like the last one of the decoder's `transformer`."""
    config = copy.copy(transformer)
    config.windows = transformer.windows[-1:]
    specs = maker.specs(stack, config)
    depths = []
    for spec in specs.layer_specs or ():
        blocks = TransformerBlock(config, replace(specs, layer_specs=[spec]))
        depths.append(PredictionDepth(config, lambda: maker.norm(config), blocks))
    return MultiTokenPrediction(depths, maker.config.model.multi_token_prediction.weight)


def _encoder(maker: BlockMaker) -> Encoder:
    (stack,) = stacks(maker.config)
    transformer = maker.transformer(stack.num_layers)
    embedding = build_embedding(maker.config, transformer, maker.vocab_size)
    maker.built("embedding.", embedding)
    blocks = TransformerBlock(transformer, maker.specs(stack, transformer))
    model = maker.config.model
    if model.num_labels is not None:
        return Encoder(embedding, blocks, label_head(model, transformer))
    return Encoder(embedding, blocks, Head(model, transformer, maker.vocab_size))


def _encoder_decoder(maker: BlockMaker) -> EncoderDecoder:
    of_encoder, of_decoder = stacks(maker.config)
    configs = [maker.transformer(stack.num_layers) for stack in (of_encoder, of_decoder)]
    embedding = build_embedding(maker.config, configs[1], maker.vocab_size)
    maker.built("embedding.", embedding)
    encoder = TransformerBlock(configs[0], maker.specs(of_encoder, configs[0], of_source=True))
    decoder = TransformerBlock(configs[1], maker.specs(of_decoder, configs[1], has_source=True))
    return EncoderDecoder(embedding, encoder, decoder, Head(maker.config.model, configs[1], maker.vocab_size))
