"""The encoder-decoder: a causal decoder that also attends to an encoder's output."""

from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

from megamoe.kernels.attention.documents import Documents, SourceLengths
from megamoe.model.architectures.language_model import ModelWithHead, problem_of_attention
from megamoe.model.attention.caches import KeyValueCache, SourceCache
from megamoe.model.heads.vocabulary import Head


class EncoderDecoder(ModelWithHead):
    """Two stacks of blocks with one embedding (Vaswani et al. 2017).

    S: target tokens of a sequence, L: source tokens; both may end in padding.
    """

    def __init__(
        self,
        embedding: LanguageModelEmbedding,
        encoder: TransformerBlock,
        decoder: TransformerBlock,
        head: Head,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.encoder = encoder
        self.decoder = decoder
        self.head = head

    def hidden(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor,
        source_BL: Tensor,
        source_position_ids_BL: Tensor,
        documents: Documents | None = None,
        source_documents: Documents | None = None,
        source_lengths: SourceLengths | None = None,
    ) -> Tensor:
        """int64 [B, S] and [B, L] -> [S, B, H]; under sequence parallelism, this rank's part of S.

        documents, source_documents: of target and source, whose padding is a document; None: no padding.
        source_lengths: the same of the source, for cross attention.
        """
        context_LBH = self.encode(source_BL, source_position_ids_BL, source_documents)
        return self._decode(tokens_BS, position_ids_BS, documents, context_LBH, source_lengths)

    def encode(
        self, source_BL: Tensor, source_position_ids_BL: Tensor, source_documents: Documents | None = None
    ) -> Tensor:
        """int64 [B, L] -> the encoder's output [L, B, H]; under sequence parallelism, this rank's part of L.

        source_documents: of the sources, whose padding is a document; None: no padding.
        """
        embedded_LBH = self.embedding(input_ids=source_BL, position_ids=source_position_ids_BL)
        return self.encoder(embedded_LBH, attention_mask=source_documents)

    def _decode(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor,
        documents: Documents | KeyValueCache | None,
        context: Tensor | SourceCache,
        source_lengths: SourceLengths | None,
    ) -> Tensor:
        embedded_SBH = self.embedding(input_ids=tokens_BS, position_ids=position_ids_BS)
        return self.decoder(
            embedded_SBH, attention_mask=documents, context=context, context_mask=source_lengths
        )

    def encoded(
        self, source_BL: Tensor, source_position_ids_BL: Tensor, source_lengths_B: Tensor
    ) -> SourceCache:
        """int64 [B, L] -> the encoder's output for `next_logits`.

        source_lengths_B: on the CPU, the tokens of each source before its padding.
        """
        size, device = source_BL.shape[1], source_BL.device
        documents = Documents.of_lengths(source_lengths_B, size, device)
        context_LBH = self.encode(source_BL, source_position_ids_BL, documents)
        return SourceCache(context_LBH, SourceLengths.of(source_lengths_B, size, device))

    def next_logits(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor,
        source: SourceCache,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """int64 [B, S] -> fp32 [B, S, padded vocabulary] on every tensor-parallel rank, for generation.

        source: of `encoded`. cache: the tokens continue those that it holds; None: they are
        whole targets.
        """
        return self.logits_of(self._decode(tokens_BS, position_ids_BS, cache, source, None))

    def problem_with_cache(self) -> str | None:
        """See `LanguageModel`."""
        return problem_of_attention(self.decoder.layers)

    def stacks(self) -> list[nn.ModuleList]:
        """Return the encoder's blocks, then the decoder's."""
        return [self.encoder.layers, self.decoder.layers]
