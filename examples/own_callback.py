"""A callback of one's own: how long the routers' weights are, and what each evaluation found, as a table."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megamoe.registry import register
from megamoe.train.callbacks import Callback, TrainingRun


@register("callback", "router_norms")
class RouterNorms(Callback):
    """Appends `step,layer,norm` to <run>/router_norms.csv."""

    @dataclass
    class Config:
        """every: steps between two entries."""

        every: int = 10

        def __post_init__(self) -> None:
            if self.every < 1:
                raise ValueError(f"every is {self.every}, expected at least 1")

    def on_step_end(self, trainer: TrainingRun, metrics: Mapping[str, Any]) -> None:
        """On all ranks: under ZeRO 3 they gather a router's weight together."""
        step = trainer.progress.step
        if step % self.config.every:
            return
        rows = []
        for number, layer in trainer.model.moe_layers():
            weights = list(layer.router.parameters())
            with trainer.engine.gathered(weights):
                squares = sum(float(weight.detach().float().square().sum()) for weight in weights)
            rows.append(f"{step},{number},{squares**0.5:.6g}\n")
        if trainer.world.is_first:
            with (trainer.folder.path / "router_norms.csv").open("a") as file:
                file.writelines(rows)

    def on_evaluate(self, trainer: TrainingRun, metrics: Mapping[str, float]) -> None:
        """To the terminal."""
        if trainer.world.is_first:
            print(f"step {trainer.progress.step}: {dict(metrics)}")
