"""Faults of `faults.py`: in studies, and in what is kept of checkpoints."""

from tests.fault import Fault

FAULTS_OF_STUDIES = (
    Fault(
        "remote-copy",
        "the storage's copy of a damaged local checkpoint is fetched",
        "run/checkpoints.md",
        "megamoe/checkpoint/manager.py",
        "        replaced = replace is not None and ",
        "        replaced = replace is None and ",
        ("tests/checkpoint/test_remote.py",),
    ),
    Fault(
        "prune-renamed",
        "a checkpoint that was renamed stays, and does not count",
        "run/checkpoints.md",
        "megamoe/apps/checkpoints/prune.py",
        "if path not in broken and has_run_name(path)]",
        "if path not in broken]",
        ("tests/apps/checkpoints/test_prune.py",),
    ),
    Fault(
        "lab-stopped",
        "a run that stops before its last step is not complete",
        "papers/studies.md",
        "megamoe/apps/lab/runner.py",
        "    if code == 0 and step >= steps:\n",
        "    if code == 0:\n",
        ("tests/apps/lab/test_stopped.py",),
    ),
    Fault(
        "lab-tuning",
        "no value is tuned while a run of the tuning has neither ended nor failed",
        "papers/studies.md",
        "megamoe/apps/lab/tuning.py",
        "index if ended else None",
        "index",
        ("tests/apps/lab/test_tuning.py",),
    ),
    Fault(
        "lab-alone",
        "nothing runs beside it, for wall times",
        "papers/studies.md",
        "megamoe/apps/lab/runner.py",
        "if any(each.task.alone for each in running):",
        "if any(each.task.alone for each in ()):",
        ("tests/apps/lab/test_lab.py",),
    ),
)
