"""TensorBoard: every scalar under its own name, every load as a histogram over the experts.

torch is imported only here and only when asked for: `torch.utils.tensorboard` is the one writer
that can purge the steps which a resumed run repeats.
"""

from pathlib import Path
from typing import Any

from megamoe.errors import UserError


class TensorBoardSink:
    """Event files in `folder`, flushed at each step.

    Raises:
        UserError: if the tensorboard package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                f"log.tensorboard: true, but the package is missing ({error}); "
                "run `pip install tensorboard` or set log.tensorboard=false"
            ) from error
        self._make_writer = SummaryWriter
        self._folder = folder
        self._writer: Any = None

    def log(self, metrics: dict[str, Any]) -> None:
        step = metrics["step"]
        if self._writer is None:
            # From this step on, an earlier file of the same run is superseded.
            self._writer = self._make_writer(str(self._folder), purge_step=step)
        for key, value in metrics.items():
            if isinstance(value, list):
                self._add_load(key, value, step)
            elif isinstance(value, int | float) and key != "step":
                self._writer.add_scalar(key, value, step, walltime=metrics.get("time"))
        self._writer.flush()

    def _add_load(self, key: str, load_E: list[int], step: int) -> None:
        """Write a histogram with one bucket per expert; the axis is the expert's number."""
        experts = range(len(load_E))
        if not load_E:
            return
        self._writer.add_histogram_raw(
            key,
            min=0,
            max=len(load_E),
            num=sum(load_E),
            sum=sum(expert * load for expert, load in zip(experts, load_E, strict=True)),
            sum_squares=sum(expert**2 * load for expert, load in zip(experts, load_E, strict=True)),
            bucket_limits=[expert + 1.0 for expert in experts],
            bucket_counts=load_E,
            global_step=step,
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
