"""The output layer over the vocabulary, at all positions or at chosen ones, and the loss of each token."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)
from torch import Tensor, nn

from megamoe.config.schema import ModelConfig
from megamoe.kernels.autograd import Function, once_differentiable
from megamoe.kernels.choice import Kernels
from megamoe.kernels.cross_entropy import Sums, Target, statistics, write_gradient
from megamoe.model.attention.core import BlockConfig
from megamoe.model.linears import ColumnLinear
from megamoe.model.modules import Norm
from megamoe.model.scales import change_logits
from megamoe.moe.experts.activations import pointwise


def token_losses(logits_SBV: Tensor, labels_SB: Tensor, label_smoothing: float, kernels: Kernels) -> Tensor:
    """Return the cross entropy of each label, fp32 [S, B], in nats. It may write into the logits.

    logits_SBV: this rank's part of the vocabulary, in the model's dtype. labels_SB: int64, of the whole
    vocabulary. Smoothing gives a share a of the target evenly to the other of the V entries, padding
    included.
    """
    if logits_SBV.device.type == "cpu":
        return whole_token_losses(logits_SBV.float(), labels_SB, label_smoothing)
    return narrow_token_losses(logits_SBV, labels_SB, label_smoothing, kernels)


def whole_token_losses(logits_SBV: Tensor, labels_SB: Tensor, label_smoothing: float) -> Tensor:
    """Compute `token_losses` from fp32 logits by Megatron-Core's cross entropy.

    Its own smoothing takes the mean over one rank's entries alone. Its cross entropy writes into the logits,
    so what needs them comes first. For the formula see `smoothing_of`.
    """
    if label_smoothing == 0:
        return vocab_parallel_cross_entropy(logits_SBV, labels_SB)
    shard_size = logits_SBV.shape[-1]
    local_SB = labels_SB - get_tensor_model_parallel_rank() * shard_size
    here_SB = (local_SB >= 0) & (local_SB < shard_size)
    label_logit_SB = logits_SBV.gather(-1, local_SB.clamp(0, shard_size - 1)[..., None])[..., 0]
    label_logit_SB = label_logit_SB.masked_fill(~here_SB, 0)
    sums = torch.stack([label_logit_SB, logits_SBV.sum(-1), torch.full_like(label_logit_SB, shard_size)])
    label_SB, sum_SB, vocabulary_SB = reduce_from_tensor_model_parallel_region(sums)
    smoothing_SB = label_smoothing * vocabulary_SB / (vocabulary_SB - 1)
    losses = vocab_parallel_cross_entropy(logits_SBV.clone(), labels_SB)
    return losses + smoothing_SB * (label_SB - sum_SB / vocabulary_SB)


def narrow_token_losses(
    logits_SBV: Tensor, labels_SB: Tensor, label_smoothing: float, kernels: Kernels
) -> Tensor:
    """Compute `token_losses` without a second tensor of the logits' shape, in fp32 or in their dtype.

    The backward pass writes the gradient over the logits: it can run once.
    """
    shard_size = logits_SBV.shape[-1]
    local_SB = labels_SB - get_tensor_model_parallel_rank() * shard_size
    vocabulary = shard_size * get_tensor_model_parallel_world_size()
    smoothing = smoothing_of(label_smoothing, vocabulary)
    return _TokenLosses.apply(
        logits_SBV, local_SB, smoothing, vocabulary, get_tensor_model_parallel_group(), kernels
    )


def smoothing_of(share: float, vocabulary: int) -> float:
    """Return s of the loss CE + s (z_label - mean_v z_v), if a share of the target goes to the other entries.

    With s = share V / (V - 1), (1 - s) CE - s mean_v log p_v is that loss.
    """
    return share * vocabulary / (vocabulary - 1) if share else 0.0


class _TokenLosses(Function):
    """The loss of each token from the statistics of all ranks' entries."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_SBV: Tensor,
        label_SB: Tensor,
        smoothing: float,
        vocabulary: int,
        group: dist.ProcessGroup,
        kernels: Kernels,
    ) -> Tensor:
        logits_TV = logits_SBV.contiguous().view(-1, logits_SBV.shape[-1])
        label_T = label_SB.reshape(-1).contiguous()
        found = statistics(logits_TV, label_T, kernels)
        largest_T, parts_3T = found.largest_T, torch.stack(found[1:])
        if dist.get_world_size(group) > 1:
            largest_T = found.largest_T.clone()
            dist.all_reduce(largest_T, op=dist.ReduceOp.MAX, group=group)
            parts_3T[0] *= (found.largest_T - largest_T).exp()
            dist.all_reduce(parts_3T, group=group)
        sum_T, label_logit_T, total_T = parts_3T
        ctx.sums = Sums(largest_T, sum_T.reciprocal())
        ctx.target = Target(1 - smoothing, smoothing / vocabulary)
        ctx.kernels, ctx.was_written = kernels, False
        ctx.save_for_backward(logits_TV, label_T)
        losses_T = sum_T.log() - (label_logit_T - largest_T)
        if smoothing:
            losses_T += smoothing * (label_logit_T - total_T / vocabulary)
        return losses_T.view(label_SB.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SB: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.was_written:
            raise RuntimeError("the backward pass of token_losses writes over the logits, and can run once")
        ctx.was_written = True
        logits_TV, label_T = ctx.saved_tensors
        sent_T = gradient_SB.reshape(-1).float().contiguous()
        to_logits_TV = write_gradient(logits_TV, label_T, ctx.sums, sent_T, ctx.target, ctx.kernels)
        return to_logits_TV.view(*gradient_SB.shape, -1), None, None, None, None, None


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
        self.output_layer = ColumnLinear(
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

    def forward(self, hidden_SBH: Tensor, embedding_weight: Tensor, place_P: Tensor | None = None) -> Tensor:
        """Return this rank's logits, [S, B, slice] or, at the places s * B + b, [P, 1, slice].

        embedding_weight: the embedding's weight, which a tied output layer uses.
        """
        if self.gathers:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=False)
        if place_P is not None:
            hidden_SBH = hidden_SBH.flatten(0, 1)[place_P][:, None]
        if self.transform is not None:
            hidden_SBH = self.transform(hidden_SBH)
        return self.output_layer(hidden_SBH, weight=embedding_weight if self.is_tied else None)[0]

    def whole_logits(self, hidden_SBH: Tensor, embedding_weight: Tensor) -> Tensor:
        """Return all logits, fp32 [B, S, padded vocabulary], on every tensor-parallel rank."""
        whole: Tensor = gather_from_tensor_model_parallel_region(self.forward(hidden_SBH, embedding_weight))
        return whole.transpose(0, 1).float()

    def losses(
        self,
        hidden_SBH: Tensor,
        embedding_weight: Tensor,
        labels_BS: Tensor,
        label_smoothing: float,
        place_P: Tensor | None = None,
    ) -> Tensor:
        """Return the cross entropy of each label, fp32 [B, S], in nats; 0 where `place_P` has no place."""
        labels_SB = labels_BS.transpose(0, 1).contiguous()
        wanted = labels_SB if place_P is None else labels_SB.flatten()[place_P][:, None]
        logits = self.forward(hidden_SBH, embedding_weight, place_P)
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
        return self.function(hidden)  # type: ignore[operator]
