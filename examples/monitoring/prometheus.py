"""A callback that serves a run's metrics to Prometheus: `pip install "megamoe[prometheus]"`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from megamoe.errors import UserError
from megamoe.registry import register
from megamoe.train.callbacks import Callback, TrainingRun


@register("callback", "prometheus")
class Prometheus(Callback):
    """Serves each number of metrics.jsonl as a gauge: `train/lm_loss` is `megamoe_train_lm_loss{run="demo"}`,
    `moe/layer_02/imbalance` is `megamoe_moe_layer_imbalance{run="demo", layer="02"}`.

    Rank 0 alone serves. A gauge keeps its last value until the metric is measured again.
    """

    @dataclass
    class Config:
        """port, address: where Prometheus scrapes. Other machines need an address that they reach."""

        port: int = 9400
        address: str = "127.0.0.1"

        def __post_init__(self) -> None:
            if not 0 < self.port < 65536:
                raise ValueError(f"port is {self.port}, expected 1 to 65535")

    def on_train_begin(self, trainer: TrainingRun) -> None:
        """Start the server, which ends with the run."""
        self._registry, self._gauges = CollectorRegistry(), dict[str, Gauge]()
        self._run, self._server = trainer.config.name, None
        if not trainer.world.is_first:
            return
        address, port = self.config.address, self.config.port
        try:
            self._server, _ = start_http_server(port, address, self._registry)
        except OSError as error:
            raise UserError(f"cannot serve {address}:{port} ({error.strerror}); set another port") from None
        print(f"metrics for Prometheus: http://{address}:{port}/metrics", flush=True)

    def on_step_end(self, trainer: TrainingRun, metrics: Mapping[str, Any]) -> None:
        """Set the gauges of the numbers that this step measured."""
        self._set({"step": trainer.progress.step, **metrics})

    def on_evaluate(self, trainer: TrainingRun, metrics: Mapping[str, float]) -> None:
        """Set the losses of the evaluation."""
        self._set(metrics)

    def on_train_end(self, trainer: TrainingRun) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def _set(self, metrics: Mapping[str, Any]) -> None:
        if self._server is None:
            return
        for key, value in metrics.items():
            if isinstance(value, int | float):
                name, layer = key, ""
                if of_layer := re.fullmatch(r"moe/layer_(\d+)/(.+)", key):
                    layer, name = of_layer[1], f"moe/layer/{of_layer[2]}"
                if name not in self._gauges:
                    exported = "megamoe_" + re.sub(r"\W", "_", name)
                    self._gauges[name] = Gauge(exported, name, ["run", "layer"], registry=self._registry)
                self._gauges[name].labels(self._run, layer).set(value)
