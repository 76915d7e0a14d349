"""The losses of a micro batch: of the next token, and of the further depths of multi-token prediction."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.data.batches import Batch
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.heads.multi_token_prediction import prediction_masks
from megamoe.parallel.zero.engine import Engine


@dataclass(frozen=True)
class LossSums:
    """The sums over the unmasked tokens of one micro batch: scalars on the device.

    lm_sum: of their losses. tokens: their number, fp64. mtp: both of multi-token prediction, [depths] each.
    """

    lm_sum: Tensor
    tokens: Tensor
    mtp: tuple[Tensor, Tensor] | None = None

    def times(self, factor: int) -> "LossSums":
        """Return the sums multiplied."""
        if factor == 1:
            return self
        mtp = None if self.mtp is None else (self.mtp[0] * factor, self.mtp[1] * factor)
        return LossSums(self.lm_sum * factor, self.tokens * factor, mtp)


class MultiTokenLosses:
    """The losses of a model's D depths beside its own; a model without them has D = 0.

    weight: of each depth's mean loss: DeepSeek-V3's lambda / D (2412.19437, equation 25).
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.weight = model.depth_weight / max(model.depth, 1)

    def scales(self, batches: list[Batch], engine: Engine) -> Tensor:
        """Return the number of replicas over the batch's unmasked tokens, fp32 [1 + D]. Collective.

        The first is of the model itself, the others of its depths. batches: this rank's.
        """
        counted = torch.stack([self._masks(batch).sum((1, 2), dtype=torch.float64) for batch in batches])
        # Not torch.tensor, whose copy to a GPU the host waits for.
        numbers = [
            torch.full((1,), number, dtype=torch.float64, device=engine.world.device)
            for number in counted.sum(0).tolist()
        ]
        tokens_K = numbers[0] if len(numbers) == 1 else torch.cat(numbers)
        dist.all_reduce(tokens_K, group=engine.data_group)
        return (engine.layout.replicas / tokens_K.clamp(min=1)).float()

    def sums(self, batch: Batch, rollouts: int) -> tuple[Tensor, Tensor] | None:
        """Return each depth's sum over the unmasked tokens of the last micro batch, and their number, [D].

        rollouts: how often the batch holds each sequence. None for a model without depths.
        """
        losses_DBS = self.model.take_multi_token_losses()
        if losses_DBS is None:
            return None
        masks_DBS = self._masks(batch)[1:]
        if (shard := self.model.context_shard) is not None:
            masks_DBS = shard.own(masks_DBS, dim=2)
        return (losses_DBS * masks_DBS).sum((1, 2)) / rollouts, masks_DBS.sum((1, 2)).double() / rollouts

    def weighted(self, means_D: Tensor) -> Tensor:
        """Return what the depths' mean losses add to the loss, a scalar."""
        return self.weight * means_D.sum()

    def _masks(self, batch: Batch) -> Tensor:
        return prediction_masks(batch.loss_mask_BS, batch.position_ids_BS, self.model.depth)
