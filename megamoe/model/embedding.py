"""The embedding of tokens and positions, on Megatron-Core's, which can be had before the blocks are built."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from megamoe.config.schema import ModelConfig, RunConfig
from megamoe.model.attention.core import BlockConfig
from megamoe.model.scales import scale_embeddings

# Megatron-Core's names. Its table of learned positions makes room for the sinusoidal ones.
POSITIONS = {"rope": "rope", "learned": "learned_absolute", "sinusoidal": "learned_absolute"}
LONGEST_PERIOD = 10_000.0


class SinusoidalPositions(nn.Module):
    """Fixed embeddings of positions (Vaswani et al. 2017, section 3.5), in place of a learned table.

    Position p has sin(p w_i) at the places 2 i and cos(p w_i) at 2 i + 1, w_i = 10000^(-2 i / H). The dtype
    is that of `embedding`, to which they are added.
    """

    def __init__(self, hidden_size: int, embedding: nn.Module) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.dtype_of = [embedding]  # in a list, so that it is no module of this one

    def forward(self, position_BS: Tensor) -> Tensor:
        """int64 [B, S] -> [B, S, H]."""
        even_I = torch.arange(0, self.hidden_size, 2, device=position_BS.device, dtype=torch.float32)
        rate_I = torch.exp(even_I * (-math.log(LONGEST_PERIOD) / self.hidden_size))
        angle_BSI = position_BS[..., None].float() * rate_I
        found_BSH = torch.stack((angle_BSI.sin(), angle_BSI.cos()), dim=-1).flatten(-2)
        weight = next(self.dtype_of[0].parameters())
        return found_BSH[..., : self.hidden_size].to(weight.dtype)


def megatron_position(model: ModelConfig, transformer: BlockConfig) -> Any:
    """Return Megatron-Core's name of the positions; `none` where our attention rotates heads."""
    ours = transformer.own_rotary is not None or transformer.multi_latent_attention
    return "none" if ours else POSITIONS[model.position]


def build_embedding(config: RunConfig, transformer: BlockConfig, vocab_size: int) -> LanguageModelEmbedding:
    """Return the embedding of a model that is not a GPTModel; vocab_size: after padding."""
    embedding = LanguageModelEmbedding(
        config=transformer,
        vocab_size=vocab_size,
        max_sequence_length=config.data.sequence_length,
        position_embedding_type=megatron_position(config.model, transformer),
    )
    adapt_embedding(embedding, config.model)
    return embedding


def adapt_embedding(embedding: LanguageModelEmbedding, model: ModelConfig) -> None:
    """Give Megatron-Core's embedding what it lacks: sinusoidal positions, and a factor on the embeddings."""
    if model.position == "sinusoidal":
        embedding.position_embeddings = SinusoidalPositions(model.hidden_size, embedding.word_embeddings)
    scale_embeddings(embedding.word_embeddings, model)


# Called with (prefix, module) when the module's weights are complete: the embedding, and each block. The
# prefix is that of the names of its tensors in the model, such as `model.decoder.layers.0.`
Built = Callable[[str, nn.Module], None]


@contextmanager
def embedding_first(ready: Callable[[LanguageModelEmbedding], None]) -> Iterator[None]:
    """Context in which `ready` gets a model's embedding before the model's blocks are built.

    Megatron-Core's model builds the embedding, the blocks and the output layer in one constructor, and has
    no place to step in between. PyTorch calls a hook where the model gets its embedding.
    """

    def registered(parent: nn.Module, name: str, module: nn.Module | None) -> None:
        if isinstance(parent, GPTModel) and name == "embedding":
            assert isinstance(module, LanguageModelEmbedding)
            ready(module)

    handle = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()
