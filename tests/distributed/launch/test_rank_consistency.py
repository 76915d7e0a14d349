"""Ranks that are started differently all end with the same line, and none waits for another."""

import time
from pathlib import Path
from typing import Any

import pytest

from megamoe.errors import UserError
from megamoe.parallel import launch, rank_consistency
from megamoe.parallel.rank_consistency import check_same, raise_on_all_ranks
from tests.support.ranks.entry_script import run_entry_script
from tests.support.ranks.pool import Pool

SAME: dict[str, Any] = {"configuration": {"optimizer": {"lr": 0.1, "beta1": 0.9}, "seed": 1}}
OTHER: dict[str, Any] = {"configuration": {"optimizer": {"lr": 0.2, "beta1": 0.9}, "seed": 2}}
DIFFERENT = "optimizer.lr: 0.1 on rank 0, 0.2 on rank {}; start all ranks with the same configuration".format
MISTAKE, DEFECT = UserError("data: no such file"), KeyError("name")
# By rank: its facts, and what it raises in its own checks. Then by rank: what it ends with.
CASES: dict[str, tuple[list[tuple[dict[str, Any], Exception | None]], list[str]]] = {
    "same": ([(SAME, None)] * 3, ["started"] * 3),
    "one differs": ([(SAME, None), (SAME, None), (OTHER, None)], [DIFFERENT(2)] * 3),
    "one refuses": (
        [(SAME, None), (SAME, MISTAKE), (SAME, None)],
        ["rank 1: data: no such file", "data: no such file", "rank 1: data: no such file"],
    ),
    "the first refuses": (
        [({}, MISTAKE), (SAME, None), (SAME, None)],
        ["data: no such file", *["rank 0: data: no such file"] * 2],
    ),
    "all refuse": ([(SAME, MISTAKE)] * 3, ["data: no such file"] * 3),
    "one differs and therefore refuses": ([(SAME, None), (OTHER, MISTAKE), (SAME, None)], [DIFFERENT(1)] * 3),
    "one has a defect": (
        [(SAME, None), (SAME, None), (SAME, DEFECT)],
        [*["connection closed by rank 2: KeyError: 'name'"] * 2, "'name'"],
    ),
    "same again": ([(SAME, None)] * 3, ["started"] * 3),
}


def start_each(cases: list[list[tuple[dict[str, Any], Exception | None]]]) -> list[str]:
    """Job: how this rank's start ends in each case, one after the other in one world."""
    world = launch.find_world()
    found = [_start(world, *case[world.rank]) for case in cases]
    if world.rank == 0:
        time.sleep(0.5)  # it hosts the store, from which the others read that they may start
    return found


def _start(world: launch.World, mine: dict[str, Any], error: Exception | None) -> str:
    facts: dict[str, Any] = {}
    try:
        with raise_on_all_ranks(facts, world):
            facts.update(mine)
            if error is not None:
                raise error
        check_same(world, facts, timeout_minutes=1)
    except (UserError, ConnectionError, KeyError) as message:
        return str(message)
    return "started"


def test_all_ranks_get_the_same_message(pool: Pool) -> None:
    found = pool.run(start_each, [case for case, _ in CASES.values()], ranks=3)
    for place, (name, (_, expected)) in enumerate(CASES.items()):
        assert [rank[place] for rank in found] == expected, name


def start_late(seconds: float) -> str:
    """Job: rank 1 never comes, or comes when rank 0 has waited in vain."""
    world = launch.find_world()
    rank_consistency.PATIENCE_S = 0.3
    if world.rank == 1:
        time.sleep(seconds)
        return ""
    started = time.monotonic()
    refused = _start(world, SAME, MISTAKE)
    assert time.monotonic() - started < seconds
    try:
        check_same(world, SAME, timeout_minutes=0.5 / 60)
    except ConnectionError as error:
        return f"{refused}; {error}"
    return refused


def test_a_missing_rank_is_named_and_a_mistake_is_reported_without_it(pool: Pool) -> None:
    message, _ = pool.run(start_late, 2, ranks=2)
    assert message == "data: no such file; timed out waiting for rank 1 to start"


# Of rank 1; rank 0 is started with train.micro_batch_size=2 train.global_batch_size=8 alone.
STARTS = {
    "learning rate": (["optimizer.lr=0.001"], "optimizer.lr: 0.0003 on rank 0, 0.001 on rank 1; start all"),
    "batch size that it could run": (
        ["train.micro_batch_size=4"],
        "train.micro_batch_size: 2 on rank 0, 4 on rank 1; start all ranks with the same configuration",
    ),
    "batch size that it refuses": (
        ["train.micro_batch_size=3"],
        "train.micro_batch_size: 2 on rank 0, 3 on rank 1; start all ranks with the same configuration",
    ),
    "a mistake in the configuration": (["seed=-1"], "rank 1: command line: seed: "),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.full) if c == "batch size that it could run" else c for c in STARTS],
)
def test_a_rank_with_other_arguments_ends_all_with_code_2(pool: Pool, tmp_path: Path, case: str) -> None:
    arguments, message = STARTS[case]
    found = run_entry_script(pool, tmp_path, "train.global_batch_size=8", by_rank={1: arguments})
    assert found.codes == [2, 2]
    (first,), (second,) = found.errors()
    assert first.startswith(f"error: {message.format(tmp_path)}")
    assert second.partition(": ")[2].removeprefix("rank 1: ") == first.removeprefix("error: ").removeprefix(
        "rank 1: "
    )
    assert not (tmp_path / "runs").exists()
