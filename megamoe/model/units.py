"""The units of a model: each can be handed on before the next one is built."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

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
