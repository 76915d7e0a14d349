"""A model of ours under our Trainer."""

import torch.distributed as dist

from common.timers import Timers, clock
from megamoe.config import RunConfig
from megamoe.model.architectures.decoder import GPT
from megamoe.train.trainer import Trainer
from steps.candidate import StepTime


class Ours:
    """A Trainer whose calls of the engine's methods are timed; nothing inside them is changed."""

    def __init__(self, config: RunConfig) -> None:
        self.trainer = Trainer(config)
        engine = self.trainer.engine
        # At ZeRO 3 a parameter is empty where nobody gathers it.
        sizes = [getattr(weight, "ds_numel", weight.numel()) for weight in engine.model.parameters()]
        self.parameters: int = sum(sizes)
        self.updated = sum(part.numel for shard in engine.optimizer_shards() for part in shard.fragments)
        self.timers = Timers()
        self.timers.watch(self.trainer, "_take", "data")
        for method, name in {"forward": "forward", "backward": "backward", "step": "optimizer"}.items():
            self.timers.watch(engine, method, name)
        # At ZeRO 0 the inner optimiser's own step looks for the norm.
        inner = engine.inner_optimizer
        self.timers.watch(inner, "update" if hasattr(inner, "update") else "step", "update")

    @property
    def model(self) -> GPT:
        """The model."""
        model = self.trainer.engine.model
        assert isinstance(model, GPT)
        return model

    @property
    def precision(self) -> str:
        """fp32, bf16 or fp16."""
        return self.trainer.engine.precision

    def step(self, _: int) -> StepTime:
        """Take a step of the Trainer, which the ranks begin together."""
        if self.trainer.world.size > 1:
            dist.barrier()
        self.timers.take()
        started = clock()
        self.trainer.step()
        return StepTime(total=clock() - started, **self.timers.take())

    def close(self) -> None:
        """Close the trainer and leave the process group: the last of several closes for all."""
        self.trainer.close()
