"""The pool of tokenizing processes: order, a dead worker, a dead parent."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megamoe.apps.prepare.new_tokenizers import train_bpe
from megamoe.apps.prepare.write import encode_documents, in_workers
from megamoe.data.tokenizers import load_tokenizer
from megamoe.errors import UserError

ROOT = Path(__file__).resolve().parents[3]

# Two batches are done, the third is on its way to the workers when the parent is killed.
KILLED_PARENT = """
import multiprocessing, os, signal
import numpy as np
from megamoe.apps.prepare.write import encode_documents, in_workers
from megamoe.data.tokenizers import load_tokenizer
for number, _ in enumerate(in_workers(encode_documents, [["a"]] * 20, load_tokenizer("bytes"), np.uint16, 2)):
    if number == 1:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_each_document_ends_with_eod_in_the_dtype_asked() -> None:
    tokens, lengths = encode_documents(["ab", "c"], load_tokenizer("bytes"), np.uint16)
    assert tokens.tolist() == [97, 98, 256, 99, 256] and tokens.dtype == np.uint16
    assert lengths.tolist() == [3, 2]


def test_a_worker_that_dies_is_an_error(tmp_path: Path) -> None:
    train_bpe(["abc"], 257, tmp_path / "t.json")
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    (tmp_path / "t.json").unlink()  # which ends the workers as they start
    with pytest.raises(UserError, match="workers 2: one died"):
        list(in_workers(encode_documents, [["a"]] * 9, tokenizer, np.uint16, 2))


def test_workers_do_not_outlive_a_killed_parent() -> None:
    command = [sys.executable, "-c", KILLED_PARENT]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [Path("/proc", pid) for pid in parent.stdout.readline().split()]
    assert parent.returncode == -signal.SIGKILL and len(workers) == 2
    deadline = time.monotonic() + 15
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline, "the workers still run"
        time.sleep(0.1)


def is_running(process: Path) -> bool:
    """Whether it is there and not merely waiting to be reaped."""
    try:
        return ") Z " not in (process / "stat").read_text()
    except OSError:
        return False
