"""A cache of sample indices (which tokens sample i consists of), which are verified before use.

Megatron-Core computes the indices. Its own cache, which is not used, writes in place and unpickles whatever
it finds. An entry of this cache is a few .npy files and their record, which is written last: the key (data,
split, length, seed, versions), and each file's size and SHA-256. A file that does not match its record is not
opened.
"""

import contextlib
import copy
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

from megamoe.compat.megatron_datasets import BarrierFreeBuilder, CachedGPTDataset
from megamoe.data.batches import warn
from megamoe.data.byte_files import is_stored, open_bytes
from megamoe.data.card import DataFiles
from megamoe.data.ranks import first_ranks, in_thread, raise_any_error, rank
from megamoe.data.verify import ScanCache, scan
from megamoe.errors import UserError
from megamoe.io import TEMPORARY, read_json, replace_file, replacing

VERSION = 1  # version of the entries' format; it is part of the key
VERSIONS = {"entry": VERSION, "megatron_core": version("megatron-core")}
MOST_BYTES_OF_RECORD = 1 << 24

Arrays = Sequence[np.ndarray]


class IndexCache:
    """The cache in one folder, as one rank uses it.

    Args:
        builds: whether this rank makes entries that are missing, damaged or of other data. It must hold the
            folder's lock.
        reads_whole: whether this rank compares the files' SHA-256; otherwise it compares sizes.
    """

    def __init__(self, folder: Path, *, builds: bool, reads_whole: bool) -> None:
        self._folder, self._builds, self._reads_whole = folder, builds, reads_whole
        self._scans = ScanCache(folder / "verified")

    def arrays(self, stem: str, key: str, names: Sequence[str], make: Callable[[], Arrays]) -> Arrays:
        """Return the memory-mapped arrays `names` of the entry `stem`; `make` computes missing ones.

        Args:
            key: everything that the arrays depend on.

        Raises:
            UserError: if they are missing or damaged, on a rank that does not build.
            OSError: if they cannot be written.
        """
        paths = {name: self._folder / f"{stem}-{name}.npy" for name in names}
        record = self._folder / f"{stem}.json"
        problem = self._problem(record, key, paths)
        if problem and not self._builds:
            raise UserError(
                f"data.cache: {problem}, as rank {rank()} sees it; name a folder that all machines share"
            )
        if problem:
            if record.exists() or any(path.exists() for path in paths.values()):
                warn(f"data.cache: {problem}; the index is made anew")
            self._write(record, key, paths, make())
        return [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths.values()]

    def _problem(self, record: Path, key: str, paths: dict[str, Path]) -> str | None:
        try:
            content = read_json(record, MOST_BYTES_OF_RECORD)
            files = {name: (int(facts["size"]), facts["sha256"]) for name, facts in content["files"].items()}
            found_key = content["key"]
        except FileNotFoundError:
            return f"{record} is missing"
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return f"{record} is damaged"
        if found_key != key or files.keys() != paths.keys():
            return f"{record} belongs to other data"
        for name, path in paths.items():
            size, sha256 = files[name]
            if not path.is_file():
                return f"{path} is missing"
            if path.stat().st_size != size:
                return f"{path} has {path.stat().st_size} bytes, expected {size}"
            if not self._reads_whole:
                continue
            if self._scans.of(path, ("sha256",), partial(scan, path))["sha256"] != sha256:
                return f"{path} is damaged or another index (its SHA-256 differs)"
        return None

    def _write(self, record: Path, key: str, paths: dict[str, Path], arrays: Arrays) -> None:
        record.unlink(missing_ok=True)
        files = {}
        for (name, path), array in zip(paths.items(), arrays, strict=True):
            with replacing(path) as file:
                np.save(file, array, allow_pickle=False)
            files[name] = {"size": path.stat().st_size, **scan(path)}
        replace_file(record, json.dumps({"key": key, "files": files}, indent=2).encode() + b"\n")


@dataclass
class CachedConfig(GPTDatasetConfig):
    """Megatron-Core's configuration, with this cache in place of its own.

    samples_by_source: of a blend, the samples to index of each source and split.
    """

    index_cache: IndexCache | None = None
    samples_by_source: list[list[int]] | None = None

    @staticmethod
    def remote_reader(path: str) -> Callable[[int, int], bytes] | None:
        """Return what reads the tokens of a dataset that is not on a disk; None if it is."""
        tokens = DataFiles(Path(path)).bin
        return open_bytes(tokens).read if is_stored(tokens) else None


def build_cached(
    config: CachedConfig, sizes: list[int], folder: Path, *, on_each_machine: bool = False
) -> list[Any]:
    """Return a dataset per split, or None for an empty split. With torch.distributed every rank must call it.

    Rank 0 builds the indices, the others read them. on_each_machine: the folder may be a machine's own, and
    the first rank of each builds.

    Raises:
        UserError: on every rank: for a folder that cannot be written, or that another rank does not see.
    """
    # Megatron-Core warns that it does not save the indices.
    logging.getLogger("megatron.core.datasets").setLevel(logging.ERROR)
    firsts = first_ranks()
    builds = rank() in (firsts if on_each_machine else [0])
    built: list[Any] | None = None
    problem = None
    with contextlib.ExitStack() as stack:

        def build(stop: threading.Event) -> list[Any]:
            stack.enter_context(_locked(folder))
            made = _build(config, sizes, IndexCache(folder, builds=True, reads_whole=True))
            if on_each_machine:
                stack.close()  # machines that share it after all would wait for each other
            return made

        def read(stop: threading.Event) -> list[Any]:
            return _build(config, sizes, IndexCache(folder, builds=False, reads_whole=rank() in firsts))

        try:
            built = in_thread(build if builds else None)
        except OSError as error:
            problem = f"data.cache {str(folder)!r}: {error.strerror}; name a folder that can be written"
        except UserError as error:
            problem = str(error)
        raise_any_error(problem)
        try:
            found = in_thread(None if builds else read)
        except (OSError, UserError) as error:
            problem = str(error)
        raise_any_error(problem)
    built = built if builds else found
    assert built is not None
    return built


def _build(config: CachedConfig, sizes: list[int], cache: IndexCache) -> list[Any]:
    config = copy.copy(config)
    config.index_cache = cache
    return list(BarrierFreeBuilder(CachedGPTDataset, sizes, lambda: True, config).build())


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make and lock the folder for this process, and remove incomplete files of killed processes."""
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock", thread_local=False):  # entered in one thread and left in another
        for path in folder.glob(f".*{TEMPORARY}"):
            path.unlink(missing_ok=True)
        yield
