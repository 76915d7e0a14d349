"""The largest attention logit of each head in a step, and QK-Clip by it after the step."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.config import RunConfig
from megamoe.metrics import names
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.attention.qk_clip import clipping
from megamoe.parallel.zero.engine import Engine
from megamoe.train.callbacks import is_due
from megamoe.train.step_record import StepRecord


class AttentionLogits:
    """Measures the logits of the steps that need it; without `optimizer.qk_clip` and
    `log.attention_logits_every` it does nothing.
    """

    def __init__(self, config: RunConfig, engine: Engine) -> None:
        self.limit, self.every = config.optimizer.qk_clip, config.log.attention_logits_every
        self._engine, self._heads = engine, config.model.num_attention_heads
        self._attentions: dict[int, Any] = {}
        if self.limit is not None or self.every:
            model = engine.model
            assert isinstance(model, LanguageModel)
            self._attentions = {number: block.self_attention for number, block in model.blocks()}

    def begin(self, step: int) -> None:
        """Prepare a step, counted from 1."""
        self._is_due = self.limit is not None or is_due(step, self.every)
        for attention in self._attentions.values():
            attention.core_attention.measures_logits = self._is_due
            attention.core_attention.largest_logit_N = None

    def finish(self, record: StepRecord) -> dict[str, Any]:
        """Clip if the step is applied; return the metrics, of the weights before the step. Collective."""
        if not self._is_due:
            return {}
        largest_LN = self._of_stage()
        by_layer = dict(zip(self._attentions, largest_LN.tolist(), strict=True))
        if record.problem is None and self.limit is not None:
            self._clip(largest_LN, self.limit)
        if self._engine.layout.pipeline > 1:
            stages: list[Any] = [None] * self._engine.layout.pipeline
            dist.all_gather_object(stages, by_layer, group=self._engine.groups.pipeline)
            by_layer = dict(sorted(item for stage in stages for item in stage.items()))
        all_heads = [logit for of_layer in by_layer.values() for logit in of_layer]
        metrics: dict[str, Any] = {names.LARGEST_LOGIT: max(all_heads)}
        if self.limit is not None:
            metrics[names.CLIPPED_HEADS] = sum(logit > self.limit for logit in all_heads)
        of_layers = {names.fill(names.HEADS_LOGITS, f"{n:02d}"): logits for n, logits in by_layer.items()}
        return metrics | of_layers

    def _of_stage(self) -> Tensor:
        """Return the largest logits of all heads of this stage's layers, over all its ranks."""
        engine = self._engine
        shape = len(self._attentions), self._heads
        largest_LN = torch.full(shape, -torch.inf, device=engine.world.device)
        for mine_N, attention in zip(self._own(largest_LN), self._attentions.values(), strict=True):
            core = attention.core_attention
            if core.context is not None:
                mine_N = core.context.own_heads(mine_N)
            if core.largest_logit_N is not None:
                mine_N.copy_(core.largest_logit_N)
        dist.all_reduce(largest_LN, dist.ReduceOp.MAX, group=engine.groups.stage)
        return largest_LN

    def _own(self, largest_LN: Tensor) -> Tensor:
        """Return the view of the heads whose weights this rank has."""
        tensor = self._engine.layout.tensor
        return largest_LN.chunk(tensor, 1)[self._engine.world.rank % tensor]

    def _clip(self, largest_LN: Tensor, limit: float) -> None:
        """Scale the weights of this rank's heads above the limit; all replicas of the weights do the same."""
        factor_LN = self._own((limit / largest_LN).where(largest_LN > limit, 1.0))
        above_L = (factor_LN < 1).any(1).tolist()
        for attention, factor_N, above in zip(self._attentions.values(), factor_LN, above_L, strict=True):
            if above:
                self._engine.project(clipping(attention, factor_N))
