"""The output layer over the vocabulary, at all positions or at those whose loss is wanted."""

import copy

from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from megamoe.config.schema import ModelConfig
from megamoe.model.attention.core import BlockConfig
from megamoe.model.heads.loss import token_losses
from megamoe.model.norm import Norm
from megamoe.model.scales import change_logits
from megamoe.moe.experts.activations import pointwise


class Head(nn.Module):
    """From the last hidden states to the logits, of which each tensor-parallel rank has a part.

    Its own weights outside of the output layer (model.head_transform: the linear layer, activation and norm
    of BERT's masked language model) are whole on every rank, and so are their gradients: under sequence
    parallelism the hidden states are gathered before.
    """

    def __init__(self, model: ModelConfig, transformer: BlockConfig, vocab_size: int) -> None:
        super().__init__()
        self.gathers = transformer.sequence_parallel
        whole = copy.copy(transformer)
        whole.sequence_parallel = False
        self.kernels = transformer.kernels
        self.transform: nn.Module | None = None
        if model.head_transform:
            linear = nn.Linear(model.hidden_size, model.hidden_size)
            assert transformer.init_method is not None
            transformer.init_method(linear.weight)
            nn.init.zeros_(linear.bias)
            activation = _Activation(pointwise(model.activation))
            self.transform = nn.Sequential(linear, activation, Norm(whole, model.hidden_size, model.norm_eps))
        self.output_layer = ColumnParallelLinear(
            model.hidden_size,
            vocab_size,
            config=whole,
            init_method=transformer.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=model.tie_embeddings,
        )
        change_logits(self.output_layer, model)
        self.is_tied = model.tie_embeddings

    def forward(self, hidden_SBH: Tensor, words: Tensor, place_P: Tensor | None = None) -> Tensor:
        """Return this rank's logits, [S, B, slice] or, at the places s * B + b, [P, 1, slice].

        words: the embedding's weight, which a tied output layer uses.
        """
        if self.gathers:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=False)
        if place_P is not None:
            hidden_SBH = hidden_SBH.flatten(0, 1)[place_P][:, None]
        if self.transform is not None:
            hidden_SBH = self.transform(hidden_SBH)
        logits: Tensor = self.output_layer(hidden_SBH, weight=words if self.is_tied else None)[0]
        return logits

    def whole_logits(self, hidden_SBH: Tensor, words: Tensor) -> Tensor:
        """Return all logits, fp32 [B, S, padded vocabulary], on every tensor-parallel rank."""
        whole: Tensor = gather_from_tensor_model_parallel_region(self.forward(hidden_SBH, words))
        return whole.transpose(0, 1).float()

    def losses(
        self,
        hidden_SBH: Tensor,
        words: Tensor,
        labels_BS: Tensor,
        label_smoothing: float,
        place_P: Tensor | None = None,
    ) -> Tensor:
        """Return the cross entropy of each label, fp32 [B, S], in nats; 0 where `place_P` has no place."""
        labels_SB = labels_BS.transpose(0, 1).contiguous()
        wanted = labels_SB if place_P is None else labels_SB.flatten()[place_P][:, None]
        logits = self.forward(hidden_SBH, words, place_P)
        losses = token_losses(logits, wanted, label_smoothing, self.kernels)
        if place_P is not None:
            whole_T = losses.new_zeros(labels_SB.numel())
            losses = whole_T.index_copy(0, place_P, losses[:, 0]).view(labels_SB.shape)
        return losses.transpose(0, 1)


class _Activation(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.function(hidden)  # type: ignore[operator]
        return found
