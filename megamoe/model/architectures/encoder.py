"""The encoder: bidirectional attention, and a head that predicts tokens or labels."""

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from megamoe.kernels.attention.documents import Documents
from megamoe.model.architectures.language_model import ModelWithHead
from megamoe.model.heads.labels import LabelHead
from megamoe.model.heads.vocabulary import Head


class Encoder(ModelWithHead):
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

        documents: a token sees its own one only, and padding is a document; None: whole sequences. The losses
        of a model with `model.num_labels` are those of its head (`LabelHead`).
        """
        embedded_SBH = self.embedding(input_ids=tokens_BS, position_ids=position_ids_BS)
        return self.encoder(embedded_SBH, attention_mask=documents)

    def label_logits(self) -> Tensor | None:
        """See `LanguageModel`."""
        return self.head.logits if isinstance(self.head, LabelHead) else None

    def stacks(self) -> list[nn.ModuleList]:
        """Return the only stack."""
        return [self.encoder.layers]
