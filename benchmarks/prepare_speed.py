"""The speed and memory of tools/prepare_data.py on parquet, beside the tokenizer library's own batches.

python benchmarks/prepare_speed.py --gigabytes 1 --workers 2 --rounds 5

Makes a parquet corpus of mock text in a folder that is deleted afterwards. A round times both, in turn first:
the preparation with so many workers, and `Tokenizer.encode_batch_fast` of the same texts with as many
threads, reading included in both. The preparation also writes, hashes and joins. Memory is the most that one
process held. Exit code 1 if the median ratio is under 0.8, or a process held 1 GB.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LEAST_RATIO, MOST_BYTES = 0.8, 1e9
ROWS = 5000  # of a row group
VOCABULARY = 16384

# Reads argv[2] as argv[3] threads would, by the tokenizer argv[1].
LIBRARY = """
import sys
from pyarrow import parquet
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.encode_special_tokens = True
count = 0
for batch in parquet.ParquetFile(sys.argv[2]).iter_batches(1024, columns=["text"]):
    texts = batch.column(0).to_pylist()
    count += sum(len(one.ids) for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
print(count)
"""


def make_corpus(path: Path, size: int) -> None:
    """Write documents of about 4 kB, of words with Zipf's frequencies, until the texts have `size` bytes."""
    import pyarrow
    from pyarrow import parquet

    draw = np.random.default_rng(1)
    letters = np.array(list("etaoinshrdlcumwfgypbvkjxqz"))
    frequencies = 1 / np.arange(2, 28)
    words = [
        "".join(draw.choice(letters, n, p=frequencies / frequencies.sum()))
        for n in draw.integers(2, 12, 50_000)
    ]
    schema, written = pyarrow.schema([("text", pyarrow.string())]), 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while written < size:
            lengths = draw.integers(100, 1100, ROWS)
            ids = np.minimum(draw.zipf(1.2, int(lengths.sum())) - 1, len(words) - 1)
            parts = np.split(ids, np.cumsum(lengths)[:-1])
            texts = [" ".join([words[i] for i in part.tolist()]) for part in parts]
            written += sum(map(len, texts))
            writer.write_table(pyarrow.table({"text": texts}, schema))


def timed(command: list[str], threads: int) -> dict[str, Any]:
    """Run a command; return its seconds and the most bytes that it, or a process of it, held."""
    before = time.monotonic()
    environment = {**os.environ, "RAYON_NUM_THREADS": f"{threads}", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "true"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    peak = 0
    while process.poll() is None:
        peak = max(peak, *map(resident, tree_of(process.pid)))
        time.sleep(0.05)
    seconds = time.monotonic() - before
    if process.returncode:
        assert process.stderr is not None
        sys.exit(f"{command[1]}: {process.stderr.read().decode()[-2000:]}")
    return {"seconds": seconds, "peak": peak}


def tree_of(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    found = [pid]
    for parent in found:
        try:
            tasks = Path(f"/proc/{parent}/task").iterdir()
            found += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of text (default 1)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where the corpus is made (default: the folder for temporary files)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        corpus, tokenizer = folder / "corpus.parquet", folder / "sample.tokenizer.json"
        make_corpus(corpus, int(options.gigabytes * 1e9))
        tool = [sys.executable, str(ROOT / "tools/prepare_data.py"), str(corpus), "--overwrite"]
        timed([*tool, "--tokenizer", "train", "--vocab-size", str(VOCABULARY), "--max-documents", "5000",
               "--output", str(folder / "sample")], 1)  # fmt: skip
        ours = [*tool, "--tokenizer", str(tokenizer), "--workers", str(options.workers)]
        ours += ["--output", str(folder / "out")]
        library = [sys.executable, "-c", LIBRARY, str(tokenizer), str(corpus)]
        rounds = []
        for number in range(options.rounds):
            order = [("ours", ours), ("library", library)]
            found = {name: timed(command, options.workers) for name, command in order[:: (-1) ** number]}
            rounds.append(found)
            print(json.dumps({"round": number, **found}), flush=True)
        ratio = statistics.median(found["library"]["seconds"] / found["ours"]["seconds"] for found in rounds)
        peak = max(found["ours"]["peak"] for found in rounds)
        print(
            f"median ratio {ratio:.3f} (at least {LEAST_RATIO}), largest process {peak / 1e6:.0f} MB (under "
            f"{MOST_BYTES / 1e6:.0f})"
        )
        return int(ratio < LEAST_RATIO or peak >= MOST_BYTES)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
