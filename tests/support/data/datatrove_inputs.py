"""The input of the pipelines that are compared between datatrove's executors, and how they are run."""

import json
import os
import subprocess
import sys
from pathlib import Path

from megamoe.data.verify import verify_in_full

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(Path(__file__).with_name("datatrove_run.py"))
ENDINGS = (".bin", ".idx", ".counts.npy", ".card.json")


def make_lines(folder: Path) -> None:
    """Write JSON lines in several files, some of them blank."""
    folder.mkdir()
    for number in range(7):
        texts = [" " if n == 3 else f"{number} né {n} " * (n + 1) for n in range(20)]
        lines = [json.dumps({"text": text, "id": f"{number}-{n}"}) for n, text in enumerate(texts)]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))


def environment() -> dict[str, str]:
    """Return the variables of a process that finds the project, its examples and the packages of this one."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT}/examples/data:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
    }


def run_pipeline(folder: Path, kind: str, *options: str, name: str = "") -> None:
    """Write the dataset `name` (default: the kind of the executor) in a folder from its `in`."""
    name = name or kind
    paths = [str(folder / "in"), str(folder / name), str(folder / f"work_{name}")]
    done = subprocess.run(
        [sys.executable, SCRIPT, kind, *paths, *options], env=environment(), capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def contents(prefix: Path) -> list[bytes]:
    """Return the files of a dataset, which is verified."""
    verify_in_full(str(prefix))
    return [Path(f"{prefix}{ending}").read_bytes() for ending in ENDINGS]
