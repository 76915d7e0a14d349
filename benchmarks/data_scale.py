"""Time, memory and index size of preparing and opening a large dataset, on mock tokens.

    python benchmarks/data_scale.py [--tokens 1e7 1e8 1e9] [--workers 2] [--folder /var/tmp]

For each number of tokens (uint16, documents of 500 tokens on average) it prints a line for each of
- parts: the dataset is written in parts by several processes and joined, as tools/prepare_data.py does; the
  tokens are random, so that the time is that of everything but tokenizing;
- one process: the same by one process; the files must be equal;
- killed: the same by several processes that are killed (SIGKILL) after half of the parts, and started again;
- samples, documents: a process opens the dataset as a run does (data.order; data.verify: structure), for one
  epoch of samples of 4,096 tokens, and reads 2,000 samples.

wall and CPU: seconds of it and its processes. Peak: the most memory that its largest process held (VmHWM), in
MiB, and how much of that it held before (its imports). The folder needs 3 x 2 bytes for each token, and is
emptied.
"""

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from common import resident
from common.command import parser_of, positive
from megamoe.data.card import DataFiles
from megamoe.data.index_file import write_index
from megamoe.data.parts import FOLDER, Part, join_parts, unfinished, write_parts

VOCABULARY, DOCUMENT, SEQUENCE, SAMPLES = 50_000, 500, 4096, 2000
PART, CHUNK = 1 << 24, 1 << 20  # tokens


def mock_part(tokens: int, part: Part) -> dict[str, Any]:
    """Write a part of random tokens in documents of random lengths."""
    generator = np.random.default_rng(int(part.key))
    lengths = []
    counts_V = np.zeros(VOCABULARY, dtype=np.int64)
    left = min(PART, tokens - int(part.key) * PART)
    with open(part.files.bin, "wb") as out:
        while left:
            size = min(CHUNK, left)
            tokens_N = generator.integers(0, VOCABULARY, size, dtype=np.uint16)
            ends_N = np.unique(generator.integers(1, size, size // DOCUMENT))
            lengths.append(np.diff(ends_N, prepend=0, append=size))
            counts_V += np.bincount(tokens_N, minlength=VOCABULARY)
            out.write(tokens_N.tobytes())
            left -= size
    write_index(part.files.idx, np.uint16, lengths)
    np.save(part.files.counts, counts_V, allow_pickle=False)
    return {"documents": sum(map(len, lengths)), "peak": peak_mib()}


def peak_mib() -> float:
    """Return the most resident memory that this process has held, in MiB."""
    return resident.peak() / 2**20


def build(prefix: str, tokens: int, workers: int) -> dict[str, Any]:
    """Write, or finish, the dataset `prefix`."""
    before, files = peak_mib(), DataFiles(Path(prefix))
    folder = Path(f"{prefix}.{FOLDER}")
    folder.mkdir(exist_ok=True)
    numbers = range(-(-tokens // PART))
    parts = [Part(DataFiles(folder / f"{number:05}"), (), str(number)) for number in numbers]
    missing = unfinished(parts, files.bin)
    write_parts(missing, partial(mock_part, tokens), workers, lambda _: None)
    in_workers = max(part.read()["facts"]["peak"] for part in parts)  # type: ignore[index]
    join_parts(parts, files, np.uint16)
    return {"peak": max(peak_mib(), in_workers), "before": before, "written": len(missing)}


def open_dataset(prefix: str, order: str) -> dict[str, Any]:
    """Open the dataset as a run does, and read samples from all over it."""
    from megamoe.config.schema import DataConfig, SourceConfig
    from megamoe.data.datasets import Vocabulary, build_datasets

    data = DataConfig(
        sources=[SourceConfig(prefix)],
        split=[1.0, 0.0, 0.0],
        sequence_length=SEQUENCE,
        verify="structure",
        order=order,  # type: ignore[arg-type]
    )
    samples = DataFiles(Path(prefix)).bin.stat().st_size // 2 // SEQUENCE - 1
    vocabulary = Vocabulary(VOCABULARY, 0, None)
    before = peak_mib()
    build_datasets(data, vocabulary, seed=1, train_samples=1, validation_samples=0)  # the .idx is verified
    begin, peak = time.perf_counter(), peak_mib()
    dataset = build_datasets(data, vocabulary, seed=1, train_samples=samples, validation_samples=0).train
    start = time.perf_counter() - begin
    for number in np.random.default_rng(0).integers(0, samples, SAMPLES).tolist():
        dataset[number]
    read = time.perf_counter() - begin - start
    index = sum(path.stat().st_size for path in (Path(prefix).parent / "cache").glob("*.npy"))
    return {
        "peak": peak_mib(),
        "before": before,
        "verified": peak,
        "start_s": start,
        "sample_us": 1e6 * read / SAMPLES,
        "index_bytes": index,
    }


def measured(*step: Any, killed_at: int = 0) -> dict[str, Any]:
    """Run a step of this script in a process of its own; return its results and its times."""
    begin, usage = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, __file__, "--step", json.dumps(step)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        records = Path(f"{step[1]}.{FOLDER}")
        while killed_at and len(list(records.glob("*.json"))) < killed_at:
            time.sleep(0.01)
        if killed_at:
            os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0]
    if process.returncode:
        return {}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
    return {**json.loads(output), "wall": time.perf_counter() - begin, "cpu": cpu}


def sha256(prefix: str) -> str:
    """Return the SHA-256 of .bin and .idx."""
    digest = hashlib.sha256()
    for ending in (".bin", ".idx", ".counts.npy"):
        with open(prefix + ending, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def show(name: str, found: dict[str, Any], rest: str = "") -> None:
    """Print a line of the table."""
    text = (
        f"  {name:<12} wall {found['wall']:6.1f} s  CPU {found['cpu']:6.1f} s  peak {found['peak']:5.0f} MiB"
    )
    print(f"{text} (before {found['before']:.0f})  {rest}")


def measure(tokens: int, workers: int, folder: Path) -> bool:
    """Print the lines of one size; return whether all ways gave the same files."""
    same = []
    print(f"{tokens:,} tokens, {workers} processes")
    names = {"parts": workers, "one process": 1, "killed": workers}
    prefixes = [str(folder / name.replace(" ", "_")) for name in names]
    for (name, processes), prefix in zip(names.items(), prefixes, strict=True):
        if name == "killed":
            half = -(-tokens // PART) // 2
            measured("build", prefix, tokens, processes, killed_at=half)
        found = measured("build", prefix, tokens, processes)
        same.append(sha256(prefix))
        size = Path(prefix + ".idx").stat().st_size
        show(name, found, f"{found['written']} parts written, .idx {size:,} bytes, SHA-256 {same[-1][:8]}")
        shutil.rmtree(f"{prefix}.{FOLDER}")
        if prefix != prefixes[0]:
            Path(prefix + ".bin").unlink()
    for order in ("samples", "documents"):
        found = measured("open", prefixes[0], order)
        rest = f"start {found['start_s']:.3f} s, {found['sample_us']:.0f} us a sample, sample index "
        show(
            order,
            found,
            rest + f"{found['index_bytes']:,} bytes; .idx verified at {found['verified']:.0f} MiB",
        )
    return len(set(same)) == 1


def main() -> int:
    """Measure and print; 1 if two ways gave different files."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e7, 1e8, 1e9])
    parser.add_argument("--workers", type=positive, default=2)
    parser.add_argument("--folder", default=os.environ.get("TMPDIR", "/var/tmp"))
    parser.add_argument("--step", type=json.loads, help="for the processes that the script starts")
    arguments = parser.parse_args()
    if arguments.step:
        name, *values = arguments.step
        print(json.dumps(build(*values) if name == "build" else open_dataset(*values)))
        return 0
    same = True
    for tokens in arguments.tokens:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            same &= measure(int(tokens), arguments.workers, Path(folder))
    print("files equal" if same else "FILES DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
