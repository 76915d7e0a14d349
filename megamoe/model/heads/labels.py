"""Heads that predict labels from an encoder's hidden states: of a whole text, of its tokens, or a span."""

from abc import ABC, abstractmethod

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.nn import functional

from megamoe.config.schema import ModelConfig
from megamoe.kernels.attention.documents import Documents
from megamoe.model.attention.core import BlockConfig

SIDES = 2  # of a span: its first and its last token


class LabelHead(nn.Module, ABC):
    """The linear output layer on states, and its losses.

    The weights are whole on every rank, and so are their gradients: under sequence parallelism the hidden
    states are gathered before.

    logits: those of the last forward pass in evaluation mode, fp32; None before it.
    """

    def __init__(self, model: ModelConfig, transformer: BlockConfig) -> None:
        super().__init__()
        assert model.num_labels is not None and transformer.init_method is not None
        self.predicts = model.predicts
        self.gathers = transformer.sequence_parallel
        self.pooling = model.pooling
        self.pooler = nn.Linear(model.hidden_size, model.hidden_size) if model.pooler else None
        self.output = nn.Linear(model.hidden_size, model.num_labels)
        for linear in filter(None, (self.pooler, self.output)):
            transformer.init_method(linear.weight)
            nn.init.zeros_(linear.bias)
        self.logits: Tensor | None = None

    def forward(self, hidden_SBH: Tensor, documents: Documents | None) -> Tensor:
        """Return the logits, fp32, the same on every tensor-parallel rank.

        hidden_SBH: under sequence parallelism, this rank's part of the positions. documents: the text of each
        sequence is the first one, and padding the second; None: no sequence has padding.
        """
        if self.gathers:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=False)
        logits = self._logits(hidden_SBH, documents)
        self.logits = None if self.training else logits
        return logits

    def _logits(self, hidden_SBH: Tensor, documents: Documents | None) -> Tensor:
        """Return the logits of each token, fp32 [B, S, labels]."""
        return self.output(hidden_SBH.transpose(0, 1)).float()

    def losses(
        self, hidden_SBH: Tensor, labels_BS: Tensor, documents: Documents | None, label_smoothing: float
    ) -> Tensor:
        """Return the losses, fp32 [B, S], each at the place of its label.

        label_smoothing: the share that the other labels get.
        """
        return self._losses(self.forward(hidden_SBH, documents), labels_BS, label_smoothing)

    @abstractmethod
    def _losses(self, logits: Tensor, labels_BS: Tensor, label_smoothing: float) -> Tensor: ...


class Classifier(LabelHead):
    """One pooled hidden state of each text, and its logits, [B, labels] (Devlin et al. 2018, BERT, section
    4.1).

    The pooled state is the first token's, or the mean over the tokens without padding (model.pooling).
    model.pooler adds BERT's linear layer and tanh. The label stands at the first token, and so does its loss:
    the cross entropy of a label (int64), or the squared error of a number (fp32).
    """

    def _logits(self, hidden_SBH: Tensor, documents: Documents | None) -> Tensor:
        pooled_BH = hidden_SBH[0] if self.pooling == "first" else _mean(hidden_SBH, documents)
        if self.pooler is not None:
            pooled_BH = self.pooler(pooled_BH).tanh()
        return self.output(pooled_BH).float()

    def _losses(self, logits_BC: Tensor, labels_BS: Tensor, label_smoothing: float) -> Tensor:
        if self.predicts == "number":
            loss_B = (logits_BC[:, 0] - labels_BS[:, 0]).square()
        else:
            loss_B = _cross_entropy(logits_BC, labels_BS[:, 0], label_smoothing)
        return functional.pad(loss_B[:, None], (0, labels_BS.shape[1] - 1))


class TokenClassifier(LabelHead):
    """Logits of each token, [B, S, labels], without pooling (Devlin et al. 2018, BERT, section 5.3).

    Each token has a label, int64, and its cross entropy as loss.
    """

    def _losses(self, logits_BSC: Tensor, labels_BS: Tensor, label_smoothing: float) -> Tensor:
        return _cross_entropy(logits_BSC, labels_BS, label_smoothing)


class SpanHead(LabelHead):
    """The scores of each token as the first and as the last of a span, [B, S, 2] (Devlin et al. 2018, BERT,
    section 4.2); minus infinity at padding.

    The labels are the positions of both, int64, at places 0 and 1. The losses there are the cross entropies
    over the positions, without label smoothing.
    """

    def _logits(self, hidden_SBH: Tensor, documents: Documents | None) -> Tensor:
        logits_BSC = super()._logits(hidden_SBH, documents)
        if documents is None:
            return logits_BSC
        return logits_BSC.masked_fill((documents.start_BS != 0)[..., None], float("-inf"))

    def _losses(self, logits_BS2: Tensor, labels_BS: Tensor, label_smoothing: float) -> Tensor:
        loss_B2 = _cross_entropy(logits_BS2.transpose(1, 2), labels_BS[:, :SIDES], 0.0)
        return functional.pad(loss_B2, (0, labels_BS.shape[1] - SIDES))


def label_head(model: ModelConfig, transformer: BlockConfig) -> LabelHead:
    """Return the head that `model.predicts` names."""
    if model.predicts == "span":
        return SpanHead(model, transformer)
    return (TokenClassifier if model.predicts == "tags" else Classifier)(model, transformer)


def _cross_entropy(logits_XC: Tensor, labels_X: Tensor, label_smoothing: float) -> Tensor:
    """Return the cross entropy of each label, fp32 [...]; logits_XC: fp32 [..., labels]."""
    log_XC = logits_XC.log_softmax(-1)
    loss_X = -log_XC.gather(-1, labels_X[..., None])[..., 0]
    if not label_smoothing:
        return loss_X
    others_X = -log_XC.sum(-1) - loss_X
    return (1 - label_smoothing) * loss_X + label_smoothing * others_X / (log_XC.shape[-1] - 1)


def _mean(hidden_SBH: Tensor, documents: Documents | None) -> Tensor:
    """Return the mean over the tokens of each sequence, fp32 sums in the hidden states' dtype, [B, H]."""
    if documents is None:
        return hidden_SBH.float().mean(0).to(hidden_SBH.dtype)
    token_SB1 = (documents.start_BS == 0).T[..., None]
    sum_BH = hidden_SBH.float().masked_fill(~token_SB1, 0).sum(0)
    return (sum_BH / token_SB1.sum(0)).to(hidden_SBH.dtype)
