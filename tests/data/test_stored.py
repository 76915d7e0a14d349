"""Prepared datasets in object storage, which a local folder stands for: samples, the cache, faults."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pytest

from megamoe.apps.prepare import write
from megamoe.apps.translation.card import load_pair_card
from megamoe.apps.translation.dataset import PairDataset, PairOptions
from megamoe.config.schema import DataConfig
from megamoe.data import block_cache, blocks, stored
from megamoe.data.block_cache import BlockCache, locked, locked_byte
from megamoe.data.byte_files import ByteFile, open_bytes
from megamoe.data.card import DataFiles, save_checked
from megamoe.data.datasets import Datasets
from megamoe.data.stored import _Fetching, beside, local_copy, localized
from megamoe.data.verify import verify_sources
from megamoe.data.vocabulary import resolve_vocabulary
from megamoe.errors import ExitCode, UserError
from megamoe.train.loop import train
from tests.support.data.pairs import make_pairs
from tests.support.data.sources import build, config, make_bare_data, make_data
from tests.support.tiny import restored_process, tiny

BLOCK = 64  # bytes
TEXTS = ["".join(chr(97 + (i * j) % 26) for j in range(3 + 7 * i % 50)) for i in range(40)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((write, "BLOCK_BYTES"), (stored, "BLOCK_BYTES")):
        monkeypatch.setattr(module, name, BLOCK)
    for module in (blocks, stored):
        monkeypatch.setattr(module, "WAITS_S", (0.0, 0.0))


@pytest.fixture(name="corpus")
def _corpus(tmp_path: Path) -> str:
    """Return the prefix of a dataset of several blocks, in the folder that stands for the storage."""
    (tmp_path / "storage").mkdir()
    return make_data(tmp_path / "storage" / "corpus", TEXTS)


def remote(*paths: str, cache: Path, **options: Any) -> DataConfig:
    return config(*(f"file://{path}" for path in paths), remote_cache=str(cache), **options)


def opened(corpus: str, cache: Path, most: int = 10**9) -> ByteFile:
    BlockCache(cache).limit(most)
    return open_bytes(DataFiles(local_copy(f"file://{corpus}", cache)).bin)


def kept(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob(f"*{block_cache.BLOCKS}/*") if not path.name.startswith("."))


class Storage:
    """The file system, whose requests for ranges may fail. count: of such requests."""

    def __init__(self, fail: Callable[[int], Exception | bytes | None] = lambda count: None) -> None:
        self.fail, self.count, self._system = fail, 0, fsspec.filesystem("file")

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.count += 1
        result = self.fail(self.count)
        if isinstance(result, Exception):
            raise result
        return self._system.cat_file(path, start, end) if result is None else result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    def use(self, patch: pytest.MonkeyPatch) -> "Storage":
        patch.setattr(blocks, "open_system", lambda url: (self, url.removeprefix("file://")))
        return self


@pytest.fixture(name="no_filling")
def _no_filling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks.StoredBytes, "_fill", lambda self: None)


def assert_equal(found: Datasets, expected: Datasets) -> None:
    sets = [(found.train, expected.train), (found.test, expected.test)]
    sets += [(found.validation[name], expected.validation[name]) for name in expected.validation]
    assert found.validation.keys() == expected.validation.keys()
    for one, other in sets:
        assert (one is None) == (other is None)
        for index in range(len(other) if other is not None else 0):  # type: ignore[arg-type]
            a, b = one[index], other[index]  # type: ignore[index]
            assert a.keys() == b.keys()
            assert all(bool((a[name] == b[name]).all()) for name in a)


@pytest.mark.parametrize("order", ["documents", "samples"])
def test_samples_are_those_of_the_disk(tmp_path: Path, corpus: str, order: str) -> None:
    other = make_data(tmp_path / "storage" / "other", TEXTS[:20])
    options: dict[str, Any] = {"order": order, "split": [0.7, 0.2, 0.1], "weights": [0.7, 0.3]}
    here = config(corpus, other, validation={"more": config(other).sources}, **options)
    there = remote(corpus, other, cache=tmp_path / "cache", **options)
    there.validation = {"more": remote(other, cache=tmp_path).sources}
    there = localized(there)
    random.seed(1)
    before = random.getstate()
    assert_equal(build(there, 60, 10), build(here, 60, 10))
    assert random.getstate() == before  # checkpoints hold it
    assert there.sources[0].path.startswith(f"{tmp_path}/cache/file{tmp_path}/storage/corpus/")
    assert not list((tmp_path / "cache").rglob("*.bin"))
    for source in there.sources:  # blocks that are fetched once are not fetched again
        assert kept(Path(source.path).parent)


def test_data_without_a_card(tmp_path: Path) -> None:
    bare = make_bare_data(tmp_path / "bare")
    options: dict[str, Any] = {"tokenizer": "bytes", "sequence_length": 4}
    there = localized(remote(bare, cache=tmp_path / "cache", **options))
    assert_equal(build(there, 12), build(config(bare, **options), 12))
    # Another object of the same length: noticed when a block is fetched.
    for block in kept(tmp_path / "cache"):
        block.unlink()
    content = Path(bare + ".bin").read_bytes()
    Path(bare + ".bin").write_bytes(content[::-1])
    os.utime(bare + ".bin", (1, 1))
    with pytest.raises(UserError, match=r"bare\.bin' is damaged or was replaced: bytes 0 to 63 have state"):
        build(there, 12).train[0]


@pytest.mark.parametrize("order", [pytest.param("documents", marks=pytest.mark.full), "samples"])
def test_a_run_and_its_resume(tmp_path: Path, corpus: str, order: str, monkeypatch: Any) -> None:
    """Losses and the last checkpoint are those of the disk, with one request in 20 failing."""
    monkeypatch.setattr(blocks, "WAITS_S", (0.0,) * 9)
    fails = random.Random(5)
    Storage(lambda count: OSError("503") if fails.random() < 0.05 else None).use(monkeypatch)
    own = ["data.mock=false", f"data.order={order}", "model.vocab_size=null", "evaluation.batches=1"]
    own += ["name=a", "train.steps=4", "checkpoint={every: 2, keep: 2}", "data.split=[0.8, 0.2, 0]"]

    def losses(output: str, source: str, *overrides: str) -> list[Any]:
        with restored_process():
            places = [f"output={tmp_path / output}", f"data.sources=['{source}']"]
            places += [f"data.remote_cache={tmp_path / output / 'cache'}"]
            assert train(tiny(*own, *places, *overrides)) == ExitCode.FINISHED
        lines = (tmp_path / output / "a/metrics.jsonl").read_text().splitlines()
        return [(row["train/loss"], row.get("val/lm_loss")) for row in map(json.loads, lines)]

    url = f"file://{corpus}"
    expected = losses("disk", corpus)
    losses("again", url, "train.exit_after_steps=2")
    shutil.rmtree(tmp_path / "again" / "cache")  # another machine
    assert losses("again", url, "checkpoint.resume=auto") == expected
    assert f"path: {url}" in (tmp_path / "again/a/config.yaml").read_text()


def test_the_cache_is_bounded_and_keeps_what_was_used_last(
    tmp_path: Path, corpus: str, no_filling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "TOUCH_S", 0.0)
    storage, cache = Storage().use(monkeypatch), tmp_path / "cache"
    file, content = opened(corpus, cache, most=5 * BLOCK), Path(corpus + ".bin").read_bytes()
    for number in range(len(content) // BLOCK):
        assert file.read(number * BLOCK, BLOCK) == content[number * BLOCK : (number + 1) * BLOCK]
        assert file.read(0, 3) == content[:3]
        assert len(kept(cache)) <= 5
    names = [path.name for path in kept(cache)]
    assert "00000000" in names and storage.count == len(content) // BLOCK
    assert file.read(5, 500) == content[5:505]  # over several blocks
    BlockCache(cache).limit(BLOCK // 2)  # nothing fits: it is read all the same
    assert opened(corpus, cache, most=BLOCK // 2).read(3 * BLOCK + 1, 9) == content[3 * BLOCK + 1 :][:9]


def test_all_blocks_are_fetched_ahead(tmp_path: Path, corpus: str) -> None:
    content, cache = Path(corpus + ".bin").read_bytes(), tmp_path / "cache"
    opened(corpus, cache).read(0, 1)
    _wait_for(lambda: len(kept(cache)) == -(-len(content) // BLOCK))
    assert b"".join(path.read_bytes() for path in kept(cache)) == content


def test_what_does_not_fit_is_not_fetched_ahead(tmp_path: Path, corpus: str) -> None:
    cache = tmp_path / "cache"
    file = opened(corpus, cache, most=4 * BLOCK)
    file.read(5 * BLOCK, 1)
    _wait_for(lambda: len(kept(cache)) == 4)
    assert "00000005" in [path.name for path in kept(cache)]


def _wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        multiprocessing.Event().wait(0.01)
    raise AssertionError("it did not happen in 5 s")


def test_what_is_wrong_on_the_disk_is_fetched_again(tmp_path: Path, corpus: str, no_filling: None) -> None:
    cache, content = tmp_path / "cache", Path(corpus + ".bin").read_bytes()
    file = opened(corpus, cache)
    file.read(0, 3 * BLOCK)
    first, second, third = kept(cache)
    first.write_bytes(b"")
    second.write_bytes(content[:10])
    third.unlink()
    (cache / block_cache.STATE).write_text("nonsense")
    assert file.read(0, 3 * BLOCK) == content[: 3 * BLOCK]
    assert all(path.stat().st_size == BLOCK for path in kept(cache))


@pytest.mark.parametrize("has_card", [True, False])
@pytest.mark.parametrize("damage", ["zeros", "pipe", "folder"])
def test_a_block_of_the_right_length_is_compared_when_it_is_first_read(
    tmp_path: Path, corpus: str, no_filling: None, damage: str, has_card: bool
) -> None:
    if not has_card:
        Path(corpus + ".card.json").unlink()
    cache, content = tmp_path / "cache", Path(corpus + ".bin").read_bytes()
    first = opened(corpus, cache)
    assert first.read(0, 2 * BLOCK) == content[: 2 * BLOCK]
    block = kept(cache)[1]
    size = block.stat().st_size
    if damage == "zeros":
        block.write_bytes(bytes(size))
    else:
        block.unlink()
        (os.mkfifo if damage == "pipe" else os.mkdir)(block)
    # After a start, and by a process that has read the block before.
    for file in (opened(corpus, cache), first):
        assert file.read(BLOCK + 3, 9) == content[BLOCK + 3 : BLOCK + 12]
    assert damage == "folder" or block.stat().st_size == size
    assert file.read(0, len(content)) == content


def test_a_block_is_compared_once(tmp_path: Path, corpus: str, no_filling: None, monkeypatch: Any) -> None:
    opened(corpus, tmp_path / "cache").read(0, BLOCK)
    (block,), hashed = kept(tmp_path / "cache"), list[int]()
    os.utime(block, (1e9, 1e9))  # so that each use is noted
    digest = blocks.digest_of

    def counted(content: bytes) -> str:
        hashed.append(len(content))
        return digest(content)

    monkeypatch.setattr(blocks, "digest_of", counted)
    file = opened(corpus, tmp_path / "cache")
    for _ in range(3):
        file.read(0, 3)
        os.utime(block, ns=(10**18, block.stat().st_mtime_ns))
    assert hashed == [BLOCK]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_bytes": 0}, "block_bytes: Input should be greater than or equal to 1"),
        ({"block_bytes": "64"}, "block_bytes: Input should be a valid integer"),
        ({"block_bytes": 10**30}, "block_bytes: "),
        ({"block_bytes": True}, "block_bytes: Input should be a valid integer"),
        ({"size": -1}, "size: Input should be greater than or equal to 0"),
        ({"size": 10**20}, "size: "),
        ({"sums": "0" * 17}, "sums: 17 digits, expected "),
        ({"sums": [1]}, "sums: Input should be a valid string"),
        ({"root": "/"}, "root: String should match pattern"),
        ({"url": None}, "url: Input should be a valid string"),
        (None, "file: "),
    ],
)
def test_a_damaged_stub_is_one_line(tmp_path: Path, corpus: str, change: Any, words: str) -> None:
    path = DataFiles(local_copy(f"file://{corpus}", tmp_path / "cache")).bin
    stub = path.with_name(path.name + blocks.REMOTE)
    stub.write_text(json.dumps(None if change is None else json.loads(stub.read_text()) | change))
    with pytest.raises(UserError, match=r"\.bin\.remote is damaged \(.*; delete its folder") as error:
        open_bytes(path)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *product(["block_bytes"], [-1, "x", 10**30, 1.5, []]),
        *product(["block_sums"], [7, ["0"], "0" * 17]),
        *(("sha256", 7), ("size", "x"), ("size", -1), (None, []), (None, "x")),
    ],
)
def test_a_signed_card_that_says_nonsense_is_one_line(
    tmp_path: Path, corpus: str, key: str | None, value: Any
) -> None:
    path = Path(corpus + ".card.json")
    card = json.loads(path.read_text())
    card["bin"] = card["bin"] | {key: value} if key else value or [1]
    save_checked(card, path)
    on_a_disk = [config(corpus)] if (key, type(value)) != ("block_sums", str) else []
    for data in (remote(corpus, cache=tmp_path / "cache"), *on_a_disk):
        with pytest.raises(UserError) as error:
            build(localized(data))
        assert "card" in str(error.value) and "\n" not in str(error.value)


def test_a_network_that_comes_back_and_one_that_does_not(
    tmp_path: Path, corpus: str, no_filling: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    short: list[Exception | bytes | None] = [OSError("reset"), b"too short", None]
    storage = Storage(lambda count: short[min(count, 3) - 1]).use(monkeypatch)
    file = opened(corpus, tmp_path / "cache")
    assert file.read(0, 9) == Path(corpus + ".bin").read_bytes()[:9] and storage.count == 3
    storage.fail = lambda count: OSError("no route; tried https://me:secret@host/x?sig=hidden")
    with pytest.raises(UserError, match=r"data 'file://.*corpus\.bin' cannot be reached: no route") as error:
        file.read(BLOCK, 1)
    assert not any(word in str(error.value) for word in ("secret", "hidden", "\n"))


def test_a_damaged_object(tmp_path: Path, corpus: str, no_filling: None, monkeypatch: Any) -> None:
    file, content = opened(corpus, tmp_path / "cache"), bytearray(Path(corpus + ".bin").read_bytes())
    once = Storage(lambda count: bytes(BLOCK) if count == 1 else None)
    with pytest.MonkeyPatch.context() as patch:  # damaged on the way alone
        once.use(patch)
        assert file.read(0, 9) == content[:9]
    content[BLOCK] ^= 1
    Path(corpus + ".bin").write_bytes(content)
    Path(corpus + ".idx").touch()
    with pytest.raises(UserError, match=r"is damaged or was replaced: bytes 64 to 127 have SHA-256"):
        file.read(BLOCK, 1)
    assert len(kept(tmp_path / "cache")) == 1


@pytest.mark.parametrize("ending", [".idx", ".card.json"])
def test_a_damaged_small_file_is_not_kept(tmp_path: Path, corpus: str, ending: str) -> None:
    path, cache = Path(corpus + ending), tmp_path / "cache"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"1", b"2") if ending == ".card.json" else content[:-1] + b"\1")
    with pytest.raises(UserError, match="damaged"):
        localized(remote(corpus, cache=cache))
    path.write_bytes(content)
    assert_equal(build(localized(remote(corpus, cache=cache))), build(config(corpus)))


@pytest.mark.parametrize("lock", [locked, lambda path: locked_byte(path, 3)], ids=["file", "byte"])
def test_a_lock_is_freed_though_a_fork_has_its_file_open(tmp_path: Path, lock: Callable[[Path], Any]) -> None:
    """A loader process that is forked while a thread fetches a block."""
    ends, goes_on = os.pipe()
    with lock(tmp_path / "lock"):
        child = os.fork()
        if child == 0:
            os.close(goes_on)
            os.read(ends, 1)
            os._exit(0)
    taken = multiprocessing.get_context("fork").Process(target=take, args=(lock, tmp_path / "lock"))
    try:
        taken.start()
        taken.join(20)
        assert taken.exitcode == 0
    finally:
        taken.kill()
        os.close(goes_on)
        os.waitpid(child, 0)


def take(lock: Callable[[Path], Any], path: Path) -> None:
    with lock(path):
        pass


def test_a_full_disk_is_told_once_and_the_run_goes_on(
    tmp_path: Path, corpus: str, no_filling: None, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    cache, content = tmp_path / "cache", Path(corpus + ".bin").read_bytes()
    file, place, free = opened(corpus, cache), block_cache._place, 4

    def limited(path: Path, block: bytes) -> None:
        if len(kept(cache)) >= free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        place(path, block)

    monkeypatch.setattr(block_cache, "_place", limited)
    assert file.read(0, 12 * BLOCK) == content[: 12 * BLOCK]  # others are deleted for a block
    assert 0 < len(kept(cache)) <= 4 and not capfd.readouterr().err
    free = 0
    assert file.read(12 * BLOCK, 4 * BLOCK) == content[12 * BLOCK : 16 * BLOCK]
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and "cannot keep blocks: No space left on device" in told


def _read_all(corpus: str, cache: Path, log: str, seed: int) -> None:
    """Job: read in a random order, and note each request."""
    with open(log, "a", encoding="utf-8") as out, pytest.MonkeyPatch.context() as patch:

        def note(count: int) -> None:
            out.write("x\n")
            out.flush()

        Storage(note).use(patch)
        file = opened(corpus, cache)
        order = list(range(file.size))
        random.Random(seed).shuffle(order)
        content = Path(corpus + ".bin").read_bytes()
        assert all(file.read(at, 1) == content[at : at + 1] for at in order)


def test_two_processes_fill_one_cache(tmp_path: Path, corpus: str) -> None:
    fork = multiprocessing.get_context("fork")
    log = tmp_path / "requests"
    arguments = (corpus, tmp_path / "cache", str(log))
    jobs = [fork.Process(target=_read_all, args=(*arguments, seed)) for seed in (1, 2, 3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    found = -(-Path(corpus + ".bin").stat().st_size // BLOCK)
    assert len(log.read_text().splitlines()) == found  # each block is fetched once
    used = json.loads((tmp_path / "cache" / block_cache.STATE).read_text())["used"]
    assert used == sum(path.stat().st_size for path in kept(tmp_path / "cache"))


def _die_while_writing(corpus: str, cache: Path) -> None:
    os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    opened(corpus, cache).read(0, 1)


def test_a_killed_process_leaves_no_bad_block(tmp_path: Path, corpus: str) -> None:
    cache = tmp_path / "cache"
    opened(corpus, cache)
    job = multiprocessing.get_context("fork").Process(target=_die_while_writing, args=(corpus, cache))
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    left = list(cache.rglob(f"*{block_cache.BLOCKS}/.*"))
    assert left and not kept(cache)
    content = Path(corpus + ".bin").read_bytes()
    assert opened(corpus, cache).read(0, len(content)) == content
    os.utime(left[0], (1, 1))
    (cache / block_cache.STATE).unlink()
    BlockCache(cache).limit(10**9)
    assert not left[0].exists()


def test_what_cannot_be_read_is_one_line(tmp_path: Path, corpus: str) -> None:
    cache = tmp_path / "cache"
    for url, message in (
        ("s3://me:secret@bucket/corpus", "holds credentials"),
        ("https://host/corpus?sig=secret", "holds credentials"),
        (f"file://{tmp_path}/storage/nothing", r"no object file://.*nothing\.idx"),
        ("nonsense://bucket/corpus", "unknown scheme nonsense://"),
        ("file:///data/train.jsonl", "examples with labels"),
    ):
        with pytest.raises(UserError, match=message) as error:
            localized(config(url, remote_cache=str(cache)))
        assert "secret" not in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "plain").touch()
    with pytest.raises(UserError, match="data.remote_cache: .* cannot be written: Not a directory"):
        localized(remote(corpus, cache=tmp_path / "plain" / "below"))


def test_a_dataset_that_is_replaced_is_another_one(tmp_path: Path, corpus: str) -> None:
    cache = tmp_path / "cache"
    first = localized(remote(corpus, cache=cache))
    assert localized(remote(corpus, cache=cache)) == first
    make_data(Path(corpus), TEXTS[::-1])
    second = localized(remote(corpus, cache=cache))
    assert second.sources[0].path != first.sources[0].path
    assert_equal(build(second), build(config(corpus)))


def test_a_configuration_without_urls_stays_what_it_is(corpus: str) -> None:
    data = config(corpus)
    assert localized(data) is data


def test_a_pattern_names_datasets_of_the_storage(tmp_path: Path, corpus: str) -> None:
    make_data(tmp_path / "storage" / "other", TEXTS[:3])
    folder = f"file://{tmp_path}/storage"
    found = tiny("data.mock=false", f"data.sources=['{folder}/*']").data
    assert [source.path for source in found.sources] == [f"{folder}/corpus", f"{folder}/other"]
    with pytest.raises(UserError, match="names no prepared dataset"):
        tiny("data.mock=false", f"data.sources=['{folder}/none*']")
    with pytest.raises(UserError, match="holds credentials") as error:
        tiny("data.mock=false", "data.sources=['s3://me:secret@bucket/*']")
    assert "secret" not in str(error.value)


def test_pairs(tmp_path: Path) -> None:
    folder = make_pairs(tmp_path / "storage", [1, 0, 0], {"de": 30, "fr": 20})
    there = localized(remote(f"{folder}/train", cache=tmp_path / "cache")).sources[0].path
    sides = config(*(f"{there}.{side}" for side in ("source", "target")))
    vocabulary = resolve_vocabulary(sides, None)
    assert vocabulary.tokenizer is not None
    verify_sources(sides, [source.path for source in sides.sources], vocabulary.size)
    options = PairOptions(direction="both")
    prefixes = (there, f"{folder}/train")
    found, expected = (PairDataset(prefix, vocabulary, options) for prefix in prefixes)
    assert len(found) == len(expected) > 0
    for number in range(len(expected)):
        assert all(bool((found[number][key] == value).all()) for key, value in expected[number].items())


def test_splits_beside_pairs_in_a_storage(tmp_path: Path) -> None:
    folder = make_pairs(tmp_path / "storage", [0.6, 0.2, 0.2], {"de": 60})
    data = localized(remote(f"{folder}/train", cache=tmp_path / "cache"))
    there = data.sources[0].path
    prefix = beside(there, "test", data)
    assert Path(prefix).is_relative_to(tmp_path / "cache")
    assert load_pair_card(prefix) == load_pair_card(f"{folder}/test")
    assert beside(f"{folder}/train", "valid", data) == f"{folder}/valid"
    with pytest.raises(UserError, match=r"there is no object file://.*/none\.idx"):
        beside(there, "none", data)


def test_no_object_of_a_tokenizer_is_written_outside_of_the_folder(
    tmp_path: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of a bucket may hold `..`, which in a path would lead to other files of the user."""
    names = ("a", "../../../../../outside")
    monkeypatch.setattr(Storage, "find", lambda _, base: [f"{base}/{n}" for n in names], raising=False)
    taken: list[str] = []
    fetching = _Fetching(Storage(), "s3://b/c", "b/c", tmp_path / "s3/b/c/1", {})

    def fetched(_: Any, path: str, local: Path, size: int | None) -> Path:
        taken.append(path)
        return local

    monkeypatch.setattr(_Fetching, "_fetched", fetched)
    monkeypatch.setattr(stored.os, "replace", lambda *_: None)
    fetching._tokenizer({"reference": "tok"})
    assert taken == ["b/tok/a"]
