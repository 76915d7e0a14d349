"""The encoder: bidirectional attention, and a head that predicts tokens or labels."""

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from megamoe.kernels.attention.documents import Documents
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.heads.labels import LabelHead
from megamoe.model.heads.vocabulary import Head


class Encoder(LanguageModel):
    """Blocks in which each token sees its whole sequence or document (Devlin et al. 2018, BERT).

    It has no second segment and no prediction of the next sentence (Liu et al. 2019, RoBERTa).
    """

    def __init__(
        self, embedding: LanguageModelEmbedding, encoder: TransformerBlock, head: Head | LabelHead
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.head = head

    def hidden(
        self, tokens_BS: Tensor, position_ids_BS: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """int64 [B, S] -> [S, B, H]; under sequence parallelism, this rank's part of the positions.

        documents: a token sees its own one only, and padding is a document; None: whole sequences.
        """
        embedded_SBH = self.embedding(input_ids=tokens_BS, position_ids=position_ids_BS)
        hidden_SBH: Tensor = self.encoder(embedded_SBH, attention_mask=documents)
        return hidden_SBH

    def forward(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor,
        labels_BS: Tensor,
        documents: Documents | None = None,
        label_smoothing: float = 0.0,
        predicted_P: Tensor | None = None,
    ) -> Tensor:
        """int64 [B, S] -> cross entropy of each label, fp32 [B, S], in nats.

        predicted_P: int64, the places s * B + b whose losses are wanted; the others are 0. The output layer
        computes no other logits. With `model.num_labels` the losses are those of its head (`LabelHead`).
        """
        hidden_SBH = self.hidden(tokens_BS, position_ids_BS, documents)
        if isinstance(self.head, LabelHead):
            return self.head.losses(hidden_SBH, labels_BS, documents, label_smoothing)
        embedding_weight = self.embedding.word_embeddings.weight
        return self.head.losses(hidden_SBH, embedding_weight, labels_BS, label_smoothing, predicted_P)

    def whole_logits(
        self, tokens_BS: Tensor, position_ids_BS: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """int64 [B, S] -> fp32 [B, S, padded vocabulary] on every tensor-parallel rank."""
        assert isinstance(self.head, Head)
        hidden_SBH = self.hidden(tokens_BS, position_ids_BS, documents)
        return self.head.whole_logits(hidden_SBH, self.embedding.word_embeddings.weight)

    def label_logits(self) -> Tensor | None:
        """See `LanguageModel`."""
        return self.head.logits if isinstance(self.head, LabelHead) else None

    def stacks(self) -> list[nn.ModuleList]:
        """Return the only stack."""
        return [self.encoder.layers]
