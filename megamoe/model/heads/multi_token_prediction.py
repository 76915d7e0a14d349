"""Multi-token prediction: further blocks that predict the tokens after the next one, as extra losses.

Source: DeepSeek-AI 2024, DeepSeek-V3, section 2.2 (2412.19437). Depth k of D reads the state of depth k - 1
at position i (the model's last state for k = 1) and the embedding of token i + k. It predicts token
i + 1 + k:

    h'_k(i) = M_k [norm(embedding(t(i+k))) ; norm(h_(k-1)(i))]       M_k: 2H -> H
    h_k = norm(block_k(h'_k)),  p_k(i) = softmax(output_layer(h_k(i)))

Embedding and output layer are the model's. Both norms' states and the order of the halves are those of the
released weights: h_(k-1) has its final norm. Megatron-Core's own module is not used: it adds its loss as a
mean over one micro batch, where ours is a mean over the step's whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from megamoe.kernels.attention.documents import Documents
from megamoe.model.attention.context_parallel import ContextShard
from megamoe.model.attention.core import BlockConfig
from megamoe.model.heads.vocabulary import token_losses


class PredictionDepth(nn.Module):
    """One depth: two norms, the projection and one block with its final norm.

    Under tensor parallelism the norms and the projection are whole on every rank. Under sequence parallelism
    each rank projects its own positions.
    """

    def __init__(
        self, transformer: BlockConfig, build_norm: Callable[[], nn.Module], blocks: TransformerBlock
    ) -> None:
        super().__init__()
        hidden_size = transformer.hidden_size
        self.embedding_norm, self.hidden_norm = build_norm(), build_norm()
        self.projection = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        assert transformer.init_method is not None
        transformer.init_method(self.projection.weight)
        weight: Any = self.projection.weight
        weight.sequence_parallel = transformer.sequence_parallel  # Megatron-Core's mark: gradients are summed
        self.blocks = blocks

    def forward(
        self,
        model: GPTModel,
        hidden_SBH: Tensor,
        inputs: "DepthInputs",
        documents: Documents | None,
        rotary: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the state h_k, [S, B, H], and the cross entropy, fp32 [B, S], in nats.

        model: has the embedding and the output layer. rotary: the positions that it made, or None.
        """
        inputs = inputs.of(model.config.context)
        embedded_SBH = model.embedding(input_ids=inputs.tokens_BS, position_ids=inputs.position_ids_BS)
        both = [self.embedding_norm(embedded_SBH), self.hidden_norm(hidden_SBH)]
        projected_SBH = self.projection(torch.cat(both, dim=-1))
        state_SBH: Tensor = self.blocks(projected_SBH, attention_mask=documents, rotary_pos_emb=rotary)
        # Read here: ZeRO 3 gathers a tied weight for the module that reads it, and frees it after others.
        tied = model.share_embeddings_and_output_weights
        embedding_weight = model.shared_embedding_or_output_weight() if tied else None
        logits_SBV, _ = model.output_layer(state_SBH, weight=embedding_weight)
        labels_SB = inputs.labels_BS.transpose(0, 1).contiguous()
        losses_SB = token_losses(logits_SBV, labels_SB, inputs.label_smoothing, model.config.kernels)
        return state_SBH, losses_SB.transpose(0, 1)


@dataclass(frozen=True)
class DepthInputs:
    """The inputs of a model or of a depth: int64 [B, S] each. Those of depth k begin k places later."""

    tokens_BS: Tensor
    position_ids_BS: Tensor
    labels_BS: Tensor
    label_smoothing: float

    def of(self, shard: ContextShard | None) -> "DepthInputs":
        """Return this rank's part of whole sequences under context parallelism."""
        if shard is None:
            return self
        tokens_BS, position_ids_BS, labels_BS = (
            shard.own(each, dim=1) for each in (self.tokens_BS, self.position_ids_BS, self.labels_BS)
        )
        return DepthInputs(tokens_BS, position_ids_BS, labels_BS, self.label_smoothing)

    def shifted(self, k: int) -> "DepthInputs":
        """Return the inputs of depth k; their last k places hold the first k tokens and mean nothing."""
        tokens_BS, position_ids_BS, labels_BS = (
            each.roll(-k, 1) for each in (self.tokens_BS, self.position_ids_BS, self.labels_BS)
        )
        return DepthInputs(tokens_BS, position_ids_BS, labels_BS, self.label_smoothing)


class MultiTokenPrediction(nn.Module):
    """All depths of a model. weight: of the mean of their losses, beside the model's own loss."""

    def __init__(self, depths: list[PredictionDepth], weight: float) -> None:
        super().__init__()
        self.depths = nn.ModuleList(depths)
        self.weight = weight

    def forward(
        self,
        model: GPTModel,
        hidden_SBH: Tensor,
        inputs: DepthInputs,
        documents: Documents | None,
        rotary: Any,
    ) -> Tensor:
        """Return the cross entropy of token i + 1 + k at (k - 1, b, i), fp32 [D, B, S], in nats.

        hidden_SBH: the model's last state. inputs: the model's. What stands at the last k positions of a
        sequence or a document means nothing, see `prediction_masks`.
        """
        found = []
        for k, depth in enumerate(self.depths, 1):
            hidden_SBH, losses_BS = depth(model, hidden_SBH, inputs.shifted(k), documents, rotary)
            found.append(losses_BS)
        return torch.stack(found)


def prediction_masks(loss_mask_BS: Tensor, position_ids_BS: Tensor, depth: int) -> Tensor:
    """Return which losses of the model and of its depths count, in the mask's dtype, [1 + depth, B, S].

    loss_mask_BS: of the next tokens. position_ids_BS: int64, from 0 in each sequence, or in each document if
    documents are kept apart. Token i + 1 + k counts if it does for the model itself, and if it is of the same
    sequence and document as token i.
    """
    masks = [loss_mask_BS]
    for k in range(1, depth + 1):
        together_BS = position_ids_BS.roll(-k, 1) - position_ids_BS == k
        together_BS[:, -k:] = False
        masks.append(loss_mask_BS.roll(-k, 1) * together_BS)
    return torch.stack(masks)
