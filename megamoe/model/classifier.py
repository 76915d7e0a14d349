"""The head that predicts the label of a whole text from its hidden states."""

from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn
from torch.nn import functional

from megamoe.config.schema import ModelConfig
from megamoe.kernels.documents import Documents
from megamoe.model.attention import BlockConfig


class Classifier(nn.Module):
    """One pooled hidden state of each text, and the labels' logits (Devlin et al. 2018, BERT, section 4.1).

    The pooled state is the first token's, or the mean over the tokens without padding (model.pooling).
    model.pooler adds BERT's linear layer and tanh. The weights are whole on every rank, and so are their
    gradients: under sequence parallelism the hidden states are gathered before.

    logits_BC: those of the last forward pass in evaluation mode, fp32 [B, labels]; None before it.
    """

    def __init__(self, model: ModelConfig, transformer: BlockConfig) -> None:
        super().__init__()
        assert model.num_labels is not None and transformer.init_method is not None
        self.gathers = transformer.sequence_parallel
        self.pooling = model.pooling
        self.pooler = nn.Linear(model.hidden_size, model.hidden_size) if model.pooler else None
        self.output = nn.Linear(model.hidden_size, model.num_labels)
        for linear in filter(None, (self.pooler, self.output)):
            transformer.init_method(linear.weight)
            nn.init.zeros_(linear.bias)
        self.logits_BC: Tensor | None = None

    def forward(self, hidden_SBH: Tensor, documents: Documents | None) -> Tensor:
        """Return the logits, fp32 [B, labels], the same on every tensor-parallel rank.

        hidden_SBH: under sequence parallelism, this rank's part of the positions. documents: the text of each
        sequence is the first one, and padding the second; None: no sequence has padding.
        """
        if self.gathers:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=False)
        pooled_BH = hidden_SBH[0] if self.pooling == "first" else _mean(hidden_SBH, documents)
        if self.pooler is not None:
            pooled_BH = self.pooler(pooled_BH).tanh()
        logits_BC: Tensor = self.output(pooled_BH).float()
        self.logits_BC = None if self.training else logits_BC
        return logits_BC

    def losses(
        self, hidden_SBH: Tensor, labels_BS: Tensor, documents: Documents | None, label_smoothing: float
    ) -> Tensor:
        """Return the cross entropy of each text's label, fp32 [B, S], at its first token; 0 elsewhere.

        labels_BS: int64, the label at the first token. label_smoothing: the share that the other labels get.
        """
        log_BC = self.forward(hidden_SBH, documents).log_softmax(1)
        loss_B = -log_BC.gather(1, labels_BS[:, :1])[:, 0]
        if label_smoothing:
            others_B = -log_BC.sum(1) - loss_B
            loss_B = (1 - label_smoothing) * loss_B + label_smoothing * others_B / (log_BC.shape[1] - 1)
        return functional.pad(loss_B[:, None], (0, labels_BS.shape[1] - 1))


def _mean(hidden_SBH: Tensor, documents: Documents | None) -> Tensor:
    """Return the mean over the tokens of each sequence, fp32 sums in the hidden states' dtype, [B, H]."""
    if documents is None:
        return hidden_SBH.float().mean(0).to(hidden_SBH.dtype)
    token_SB1 = (documents.start_BS == 0).T[..., None]
    sum_BH = hidden_SBH.float().masked_fill(~token_SB1, 0).sum(0)
    return (sum_BH / token_SB1.sum(0)).to(hidden_SBH.dtype)
