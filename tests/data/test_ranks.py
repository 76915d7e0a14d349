"""Work of one rank of each machine, and one verdict on all ranks."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from megamoe.data import index_cache, ranks
from megamoe.data.datasets import build_datasets, resolve_vocabulary
from megamoe.data.stored import localized
from megamoe.errors import UserError
from tests.support.data.sources import config, make_bare_data, make_data

MACHINES = ["a", "a", "b"]


def found_by(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except UserError as error:
        return f"error: {error}"


def fail_on(number: int) -> Callable[[threading.Event], None]:
    def fail(_: threading.Event) -> None:
        if ranks.rank() == number:
            raise UserError(f"damaged, as rank {number} sees it")

    return fail


def meetings_during(work: Callable[[], object]) -> int:
    """How often this rank takes part in a collective operation while a rank works for 0.5 s."""
    times = []
    gather, ranks.POLL_S = ranks.gather, 0.05

    def note(value: Any) -> list[Any]:
        times.append(time.monotonic())
        return gather(value)

    ranks.gather = note
    work()
    ranks.gather = gather
    return len(times)


def work_long() -> None:
    ranks.once_per_machine(lambda _: time.sleep(0.5 if ranks.rank() == 2 else 0))


def build_long(folder: Path) -> None:
    """The first rank makes the sample index for 0.5 s, and the others wait."""
    build = index_cache._build

    def slow(*arguments: Any) -> list[Any]:
        time.sleep(0.5 if ranks.rank() == 0 else 0)
        return build(*arguments)

    index_cache._build = slow  # type: ignore[assignment]
    data = config(str(folder / "c"), cache=str(folder / "shared"))
    build_datasets(data, resolve_vocabulary(data, None), seed=1, train_samples=3, validation_samples=0)
    index_cache._build = build


def build_own(folder: Path) -> None:
    """Each machine has its own disk; the second one's data differs."""
    os.chdir(folder / MACHINES[ranks.rank()])
    data = config("x", cache=str(folder / "cache"))
    build_datasets(data, resolve_vocabulary(data, 500), seed=1, train_samples=3, validation_samples=0)


def build_without_a_shared_cache(folder: Path) -> None:
    data = config(str(folder / "c"), cache=str(folder / f"cache_of_{MACHINES[ranks.rank()]}"))
    build_datasets(data, resolve_vocabulary(data, None), seed=1, train_samples=3, validation_samples=0)


def build_from_storage(folder: Path) -> list[int]:
    """Each machine keeps its blocks, and makes the sample index, on its own disk."""
    cache = folder / f"blocks_of_{MACHINES[ranks.rank()]}"
    data = localized(config(f"file://{folder}/c", remote_cache=str(cache)))
    vocabulary = resolve_vocabulary(data, None)
    dataset = build_datasets(data, vocabulary, seed=1, train_samples=3, validation_samples=0).train
    assert len(list(cache.rglob("*shuffle_index.npy"))) == 1
    return [int(token) for number in range(3) for token in dataset[number]["tokens"]]


def be_a_rank(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=3)
    ranks._machine = lambda: MACHINES[rank]  # the process ends with this function
    found = {
        "firsts": ranks.first_ranks(),
        "values": found_by(lambda: sorted(ranks.once_per_machine(lambda _: ranks.rank() * 10).items())),
        "one fails": found_by(lambda: ranks.once_per_machine(fail_on(2))),
        "meetings": meetings_during(work_long),
        "meetings of a build": meetings_during(lambda: build_long(folder)),
        "differs": found_by(lambda: build_own(folder)).replace(str(folder), ""),
        "storage": found_by(lambda: build_from_storage(folder)),
        "not shared": found_by(lambda: build_without_a_shared_cache(folder)).replace(str(folder), ""),
    }
    (folder / f"found{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of three ranks on two machines."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    make_bare_data(folder / "a" / "x")
    make_data(folder / "b" / "x", ["other" * 9])
    make_data(folder / "c", ["shared" * 9])
    torch.multiprocessing.start_processes(be_a_rank, (folder,), nprocs=3, start_method="fork")
    return [json.loads((folder / f"found{rank}").read_text()) for rank in range(3)]


def test_all_ranks_get_the_same_result(found: list[dict[str, Any]]) -> None:
    for key in found[0]:
        assert found[0][key] == found[1][key] == found[2][key], key


def test_one_rank_of_each_machine_works(found: list[dict[str, Any]]) -> None:
    assert found[0]["firsts"] == [0, 2]
    assert found[0]["values"] == [[0, 0], [2, 20]]


def test_an_error_of_one_rank_is_raised_by_all(found: list[dict[str, Any]]) -> None:
    assert found[0]["one fails"] == "error: damaged, as rank 2 sees it"


def test_long_work_is_not_one_long_collective_operation(found: list[dict[str, Any]]) -> None:
    """A single collective would end at `parallel.timeout_minutes`."""
    assert found[0]["meetings"] >= 6
    assert found[0]["meetings of a build"] >= 12


def test_machines_without_a_shared_disk_read_from_object_storage(found: list[dict[str, Any]]) -> None:
    assert bytes(found[0]["storage"][:3]) in b"sharedshared"


def test_machines_with_other_data_or_without_the_cache_are_reported(found: list[dict[str, Any]]) -> None:
    assert found[0]["differs"].startswith("error: data 'x' is not the same for ranks 0 and 2: SHA-256")
    message = found[0]["not shared"]
    assert (
        message.startswith("error: data.cache: /cache_of_b/")
        and "name a folder that all machines share" in message
    )
