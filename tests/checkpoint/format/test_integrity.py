"""Checksums: of every file, in the form of sha256sum, dealt out to ranks."""

import hashlib
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megamoe.apps.checkpoints import verify
from megamoe.apps.checkpoints.describe import INTACT, integrity_of
from megamoe.checkpoint.format import files
from megamoe.checkpoint.format.files import INDEX, META, SUMS
from tests.support import checkpoint
from tests.support.checkpoint_files import flip

SHARDS = ["shard_00000.safetensors", "shard_00001.safetensors"]


def test_the_list_is_what_sha256sum_reads(folder: Path) -> None:
    assert (folder / SUMS).read_text().splitlines()[0].split() == [
        hashlib.sha256((folder / META).read_bytes()).hexdigest(),
        META,
    ]
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "--strict", SUMS], cwd=folder, check=True, capture_output=True)


@pytest.mark.parametrize("size", [0, 1, 4096, (1 << 24) - 1, 1 << 24, (1 << 24) + 1])
def test_a_digest_is_that_of_the_bytes(tmp_path: Path, size: int) -> None:
    content = random.Random(0).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    assert files.sha256(tmp_path / "file") == hashlib.sha256(content).hexdigest()


def test_ranks_deal_out_the_tensors_and_share_the_rest(folder: Path) -> None:
    for name in SHARDS:
        flip(folder / name, 100)
    message = [list(files.problems(folder, rank, 2)) for rank in range(2)]
    assert [[line.split(":")[0] for line in lines] for lines in message] == [[SHARDS[0]], [SHARDS[1]]]
    assert list(files.problems(folder, shares=0)) == []
    flip(folder / INDEX, 3)
    assert all(next(files.problems(folder, rank, 5)).startswith(INDEX) for rank in range(5))
    assert next(files.problems(folder, shares=0)).startswith(INDEX)


@pytest.mark.parametrize("name", [META, INDEX, *SHARDS, SUMS])
def test_each_missing_file_is_reported(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in integrity_of(folder)


@pytest.mark.parametrize("name", [META, INDEX, *SHARDS, SUMS])
@pytest.mark.parametrize("seed", range(8))
def test_a_bit_or_the_end_of_any_file(folder: Path, name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    size = (folder / name).stat().st_size
    if seed % 2:
        flip(folder / name, rng.randrange(size), 1 << rng.randrange(8))
    else:
        os.truncate(folder / name, rng.randrange(size))
    assert next(verify.problems(folder)).startswith(name if name != SUMS else "")


def swap(folder: Path) -> None:
    os.replace(folder / SHARDS[0], folder / "aside")
    os.replace(folder / SHARDS[1], folder / SHARDS[0])
    os.replace(folder / "aside", folder / SHARDS[1])


def grow(folder: Path) -> None:
    with (folder / SHARDS[0]).open("ab") as file:
        file.write(b"\0")


def out_of_order(folder: Path) -> None:
    lines = (folder / SUMS).read_text().splitlines(keepends=True)
    (folder / SUMS).write_text("".join(reversed(lines)))


def of_another_step(folder: Path) -> None:
    other = checkpoint.write(folder.with_name("step_00000008"), step=8)
    shutil.copy(other / META, folder / META)


@pytest.mark.parametrize("harm", [swap, grow, out_of_order, of_another_step])
def test_intact_files_of_another_checkpoint(folder: Path, harm: Callable[[Path], None]) -> None:
    assert integrity_of(folder) == INTACT
    harm(folder)
    assert integrity_of(folder).startswith("damaged: ")


def test_upper_case_and_windows_lines_are_another_list(folder: Path) -> None:
    text = (folder / SUMS).read_text()
    for other in (text.upper(), text.replace("\n", "\r\n"), text.replace("  ", " *"), text + "\n"):
        (folder / SUMS).write_text(other, newline="")
        assert integrity_of(folder).startswith(f"damaged: {SUMS}")
