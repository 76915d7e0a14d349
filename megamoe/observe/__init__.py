"""What is measured and where it goes: the record, the console, the report. Knows no other room."""

from megamoe.observe.console import ProgressLine, print_summary
from megamoe.observe.reading import read_metrics
from megamoe.observe.recorder import Recorder
from megamoe.observe.report import write_report

__all__ = ["ProgressLine", "Recorder", "print_summary", "read_metrics", "write_report"]
