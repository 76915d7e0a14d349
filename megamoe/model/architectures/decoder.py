"""The decoder: Megatron-Core's GPTModel with our loss of each token."""

from collections.abc import Iterator
from threading import get_ident
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor, nn

from megamoe.kernels.attention.documents import Documents
from megamoe.model.architectures.language_model import LanguageModel, problem_of_attention
from megamoe.model.attention.caches import KeyValueCache
from megamoe.model.attention.context_parallel import ContextShard
from megamoe.model.heads.multi_token_prediction import DepthInputs, MultiTokenPrediction
from megamoe.model.heads.vocabulary import token_losses
from megamoe.model.stage import PipelineStage, StageBlocks
from megamoe.moe.layer import MoELayer


class Decoder(GPTModel):
    """Megatron-Core's model with our loss on the logits [S, B, this rank's vocabulary slice].

    label_smoothing: of the next forward pass.
    """

    label_smoothing = 0.0

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return the embedding's weight where this rank has one: a tied last pipeline stage has a copy."""
        return None if self.embedding is None else self.embedding.word_embeddings.weight

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """int64 [B, S] and [S, B, vocabulary slice] -> fp32 [B, S]; may write into the logits."""
        labels_SB = labels.transpose(0, 1).contiguous()
        losses_SB = token_losses(logits, labels_SB, self.label_smoothing, self.config.kernels)
        return losses_SB.transpose(0, 1)


class GPT(LanguageModel):
    """A decoder-only language model that returns the loss of each token."""

    def __init__(self, model: Decoder, prediction: MultiTokenPrediction | None = None) -> None:
        super().__init__()
        self.model = model
        self.prediction = prediction
        self.stage: PipelineStage | None = None
        # State and rotary positions where they are wanted, by the thread of the pass.
        self._last: dict[int, list[tuple[Tensor, Any]]] = {}
        self._mtp_DBS: Tensor | None = None
        if prediction is not None:
            model.decoder.register_forward_hook(self._keep, with_kwargs=True)

    def forward(
        self,
        tokens_BS: Tensor,
        position_ids_BS: Tensor,
        labels_BS: Tensor,
        documents: Documents | None = None,
        label_smoothing: float = 0.0,
        hidden_SBH: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """int64 [B, S] -> cross entropy of each label, fp32 [B, S], in nats.

        Under context parallelism the inputs are of whole sequences, and the losses of this rank's part.
        A pipeline stage computes one of its chunks: it takes the hidden states of the part before (None for
        the model's first), and returns its own, [S, B, H], unless it is the model's last part.

        documents: attention is causal within each of them; None: within each sequence. Label smoothing gives
        a share of the target to all the other tokens evenly, as Megatron-Core does.
        """
        self.model.label_smoothing = label_smoothing
        if self.stage is not None:
            self.stage.enter(chunk, hidden_SBH)
        shard = self.model.config.context
        own = DepthInputs(tokens_BS, position_ids_BS, labels_BS, label_smoothing).of(shard)
        if self.prediction is not None and self.model.post_process:
            self._last[get_ident()] = []
        # Megatron-Core hands its argument `attention_mask` on to the core attention as it is (SDPAttention).
        losses_BS: Tensor = self.model(own.tokens_BS, own.position_ids_BS, documents, labels=own.labels_BS)
        if self.prediction is not None and (last := self._last.pop(get_ident(), None)) is not None:
            ((last_SBH, rotary),) = last
            inputs = DepthInputs(tokens_BS, position_ids_BS, labels_BS, label_smoothing)
            self._mtp_DBS = self.prediction(self.model, last_SBH, inputs, documents, rotary)
        return losses_BS

    def cut(self, blocks: StageBlocks) -> None:
        """Keep what belongs to a pipeline stage."""
        self.stage, self.stage_blocks = PipelineStage(self, blocks), blocks
        self.trained_elsewhere = self.stage.trained_elsewhere

    @property
    def context_shard(self) -> ContextShard | None:
        """See `LanguageModel`."""
        return self.model.config.context

    def moe_layers_of(self, chunk: int) -> Iterator[tuple[int, MoELayer]]:
        """See `LanguageModel`; multi-token prediction belongs to the model's last part."""
        blocks, own = len(self.model.decoder.layers), self.stage_blocks
        for number, layer in self.moe_layers():
            if own.ends(chunk) if number > blocks else number - 1 in own.chunks[chunk]:
                yield number, layer

    def _keep(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any], hidden_SBH: Tensor) -> None:
        if (last := self._last.get(get_ident())) is not None:
            last.append((hidden_SBH, kwargs.get("rotary_pos_emb")))

    @property
    def depth(self) -> int:
        """See `LanguageModel`."""
        return 0 if self.prediction is None else len(self.prediction.depths)

    @property
    def depth_weight(self) -> float:
        """See `LanguageModel`."""
        return 0.0 if self.prediction is None else self.prediction.weight

    def take_multi_token_losses(self) -> Tensor | None:
        """See `LanguageModel`."""
        found, self._mtp_DBS = self._mtp_DBS, None
        return found

    def whole_logits(
        self, tokens_BS: Tensor, position_ids_BS: Tensor, cache: KeyValueCache | None = None
    ) -> Tensor:
        """int64 [B, S] -> fp32 [B, S, padded vocabulary] on every tensor-parallel rank.

        cache: the tokens continue those that it holds; None: they are whole sequences.
        """
        output: Tensor = self.model(tokens_BS, position_ids_BS, cache)
        whole: Tensor = gather_from_tensor_model_parallel_region(output)
        return whole.float()

    def problem_with_cache(self) -> str | None:
        """See `LanguageModel`."""
        if problem := problem_of_attention(self.model.decoder.layers):
            return problem
        if self.model.position_embedding_type == "rope":
            return "Megatron-Core applies the rotary positions, from 0 in each forward pass"
        return None

    def stacks(self) -> list[nn.ModuleList]:
        """Return the decoder's blocks, then those of multi-token prediction."""
        found = [self.model.decoder.layers]
        if self.prediction is not None:
            found += [depth.get_submodule("blocks.layers") for depth in self.prediction.depths]
        return found
