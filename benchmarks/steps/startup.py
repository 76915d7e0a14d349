"""Seconds from a process's start to the end of the first training step.

    python -m steps.startup STARTED FILE --config examples/demo.yaml [section.key=value ...]

runs pretrain_gpt_moe.py in this process and writes to FILE, as JSON, when imports, building and the first
step had ended; in seconds after STARTED, of the monotonic clock that all processes share.
"""

import json
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common.child import ROOT, run_module
from megamoe.errors import UserError

# Nothing after the step that is measured, and no evaluation before it.
OVERRIDES = ["data.mock=true", "train.steps=1", "optimizer.warmup_steps=0", "evaluation.at_start=false"]
OVERRIDES += ["evaluation.batches=0", "checkpoint.save_at_end=false", "log.report=false"]


def seconds(config: str, overrides: list[str]) -> dict[str, float]:
    """Return the seconds by part: `imports`, `building`, `first step`; and `total`.

    Raises:
        UserError: if the run ends with an error.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "marks.json"
        run = ["--config", config, *OVERRIDES, *overrides, f"output={folder}"]
        started = time.monotonic()
        code, _, message = run_module("steps.startup", str(started), str(file), *run)
        if code != 0:
            raise UserError(f"--startup: the run ended with exit code {code}: {message[:200]}")
        marks: dict[str, float] = json.loads(file.read_text())
    parts: dict[str, float] = {}
    before = 0.0
    for name, mark in marks.items():
        parts[name], before = mark - before, mark
    return {**parts, "total": before}


def main() -> None:
    """Run; the marks are written at the end of the step."""
    started, file = float(sys.argv[1]), Path(sys.argv[2])
    marks: dict[str, float] = {}

    def mark(name: str) -> None:
        marks[name] = time.monotonic() - started

    from megamoe.compat.startup import configure_libraries, importing

    configure_libraries()
    with importing():
        from megamoe.train import loop

    mark("imports")

    class MarkingTrainer(loop.Trainer):
        def step(self, batches: Any = None) -> Any:
            mark("building")
            found = super().step(batches)
            mark("first step")
            file.write_text(json.dumps(marks))
            return found

    loop.Trainer = MarkingTrainer  # type: ignore[misc]
    script = str(ROOT / "pretrain_gpt_moe.py")
    sys.argv = [script, *sys.argv[3:]]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
