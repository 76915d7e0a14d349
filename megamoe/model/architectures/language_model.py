"""What all architectures have in common: a model that returns the loss of each label, with MoE layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from torch import Tensor, nn

from megamoe.model.attention.context_parallel import ContextShard
from megamoe.model.attention.core import SDPAttention
from megamoe.model.heads.labels import LabelHead
from megamoe.model.moe_block import Block
from megamoe.model.stage import WHOLE
from megamoe.moe.layer import MoELayer


class LanguageModel(nn.Module, ABC):
    """A transformer that returns the cross entropy of each label, fp32 [B, S], in nats.

    `stacks` are its stacks of blocks, in the order of their blocks' numbers. forward takes the keyword
    arguments of `megamoe.train.step.model_inputs`, and label_smoothing: a share of the target that all the
    other tokens get evenly.
    """

    stage_blocks = WHOLE
    trained_elsewhere: Sequence[str] = ()
    """the names of trained parameters that other pipeline stages hold"""

    @abstractmethod
    def stacks(self) -> list[nn.ModuleList]:
        """Return the stacks of blocks, in the order of the numbers of their blocks."""

    @property
    def context_shard(self) -> ContextShard | None:
        """This rank's part of the sequences under context parallelism."""
        return None

    @property
    def num_chunks(self) -> int:
        """The number of parts of the model that this rank computes, see `PipelineStage`."""
        return len(self.stage_blocks.chunks)

    def begins(self, chunk: int) -> bool:
        """Return whether a chunk of this rank takes tokens, and not another stage's hidden states."""
        return self.stage_blocks.begins(chunk)

    def ends(self, chunk: int) -> bool:
        """Return whether a chunk of this rank returns losses, and not hidden states."""
        return self.stage_blocks.ends(chunk)

    def scores_in(self, chunk: int) -> dict[int, int]:
        """Return the MoE layers of parts before whose scores a chunk takes, with the number of their experts;
        see `moe.part.Residual`.
        """
        return self.stage_blocks.scores_in(chunk)

    def scores_out(self, chunk: int) -> dict[int, int]:
        """Return those whose scores a chunk hands on to the next part."""
        return self.stage_blocks.scores_out(chunk)

    def moe_layers_of(self, chunk: int) -> Iterator[tuple[int, MoELayer]]:
        """Yield (number, layer) of the MoE layers of a chunk."""
        return self.moe_layers()

    @property
    def loss_weights(self) -> dict[int, dict[str, float]]:
        """The weights of the auxiliary losses, the same in every MoE layer; empty without one."""
        return {number: layer.losses.weights for number, layer in self.moe_layers()}

    @property
    def depth(self) -> int:
        """The number of tokens after the next one that multi-token prediction predicts."""
        return 0

    @property
    def depth_weight(self) -> float:
        """The weight of the mean of the losses of multi-token prediction."""
        return 0.0

    def take_multi_token_losses(self) -> Tensor | None:
        """Return the losses of multi-token prediction of the last forward pass, once, fp32 [depth, B, S].

        Those that count are in `prediction_masks`. None if there are none.
        """
        return None

    def label_logits(self) -> Tensor | None:
        """Return the logits of the last forward pass in evaluation mode, fp32; see `LabelHead`.

        None for a model that predicts tokens.
        """
        return None

    def problem_with_cache(self) -> str | None:
        """Return why this model cannot use a `KeyValueCache`, as the end of a sentence; None if it can."""
        return "its attention also looks at later tokens"

    def moe_layers(self) -> Iterator[tuple[int, MoELayer]]:
        """Yield (number, layer) of every MoE layer.

        The number is that of its block, or of the block before it. Blocks are counted from 1 through all
        stacks.
        """
        for number, block in self.blocks():
            for layer in block.moe_layers():
                yield number, layer

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield the blocks of this pipeline stage with their numbers, counted from 1 through all stacks."""
        blocks = [block for stack in self.stacks() for block in stack]
        for number, block in enumerate(blocks, 1):
            if isinstance(block, Block):
                yield number, block


class ModelWithHead(LanguageModel):
    """A model with one embedding for its stacks, and a head on the last one."""

    embedding: LanguageModelEmbedding
    head: Any
    hidden: Callable[..., Tensor]  # tokens and their positions, int64 [B, S], and further ones -> [S, B, H]

    def forward(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor,
        labels_BS: Tensor,
        label_smoothing: float = 0.0,
        predicted_P: Tensor | None = None,
        **further: Any,
    ) -> Tensor:
        """int64 [B, S] -> cross entropy of each label, fp32 [B, S], in nats.

        predicted_P: int64, the places s * B + b whose losses are wanted; the others are 0. The output layer
        computes no other logits. further: arguments of `hidden`.
        """
        hidden_SBH = self.hidden(tokens_BS, position_ids_BS, **further)
        if isinstance(self.head, LabelHead):
            return self.head.losses(hidden_SBH, labels_BS, further.get("documents"), label_smoothing)
        embedding_weight = self.embedding.word_embeddings.weight
        return self.head.losses(hidden_SBH, embedding_weight, labels_BS, label_smoothing, predicted_P)

    def whole_logits(self, *inputs: Any, **further: Any) -> Tensor:
        """Return the logits of `hidden` of the inputs, fp32 [B, S, padded vocabulary], on every
        tensor-parallel rank.
        """
        return self.logits_of(self.hidden(*inputs, **further))

    def logits_of(self, hidden_SBH: Tensor) -> Tensor:
        """Return the same of hidden states."""
        return self.head.whole_logits(hidden_SBH, self.embedding.word_embeddings.weight)


def problem_of_attention(blocks: nn.ModuleList) -> str | None:
    """Return why a decoder's attention cannot use a cache, as the end of a sentence; None if it can."""
    attentions: list[Any] = [block.self_attention for block in blocks]
    if any(not isinstance(attention.core_attention, SDPAttention) for attention in attentions):
        return "model.backend: transformer_engine computes the attention"
    return None
