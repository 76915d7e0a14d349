"""Recording metrics: metrics.jsonl, W&B, TensorBoard, the console line."""

from megamoe.metrics.console import ProgressLine, print_summary
from megamoe.metrics.recorder import Recorder, check_record

__all__ = ["ProgressLine", "Recorder", "check_record", "print_summary"]
