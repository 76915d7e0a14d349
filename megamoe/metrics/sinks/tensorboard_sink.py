"""TensorBoard: the scalars and histograms of `summary_of`.

torch is imported only here and only when asked for: `torch.utils.tensorboard` is the one writer
that can purge the steps which a resumed run repeats.
"""

from pathlib import Path
from typing import Any

from megamoe.errors import UserError
from megamoe.metrics import names
from megamoe.metrics.sinks.summaries import StepSummary


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
        self._make_writer, self._folder = SummaryWriter, folder
        self._writer: Any = None

    def log(self, shown: StepSummary) -> None:
        step, when = shown.step, shown.time
        if self._writer is None:
            # From this step on, an earlier file of the same run is superseded.
            self._writer = self._make_writer(str(self._folder), purge_step=step)
        for key, value in shown.scalars.items():
            if key != names.TIME:
                self._writer.add_scalar(key, value, step, walltime=when)
        for key, (counts, edges) in shown.histograms.items():
            self._add_histogram(key, counts, edges, step)
        self._writer.flush()

    def _add_histogram(self, key: str, counts: list[int], edges: list[float], step: int) -> None:
        """Write a histogram as it is; its sums are of the bins' lower edges."""
        lower = edges[:-1]
        self._writer.add_histogram_raw(
            key,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(edge * count for edge, count in zip(lower, counts, strict=True)),
            sum_squares=sum(edge**2 * count for edge, count in zip(lower, counts, strict=True)),
            bucket_limits=edges[1:],
            bucket_counts=counts,
            global_step=step,
        )

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
