"""Compares what the ranks are about to run before they join a process group, so that all start or none does.

A rank publishes facts about its run (sections of plain data by name) in the key-value store of the rendezvous
and compares them with rank 0's, first by a digest. If a rank differs from rank 0, or has refused its own
input, every rank gets the message and raises, and none waits for a missing rank. A process group would be too
late: a difference can keep ranks from joining it.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

from torch.distributed import DistStoreError, PrefixStore, Store

from megamoe.errors import UserError, printable
from megamoe.parallel import launch
from megamoe.parallel.consensus import CollectiveError

Facts = dict[str, dict[str, Any]]
# Sections in the order in which they are compared, and what to do about a difference in each.
WAYS_OUT = {
    "environment": "start all ranks with one WORLD_SIZE, on devices of one type",
    "versions": "install the same versions on all machines",
    "source": "run the same code on all machines",
    "configuration": "start all ranks with the same configuration",
    "deepspeed": "give all ranks the same DeepSpeed file",
    "vocabulary": "give all ranks the same tokenizer",
    "data": "give all machines the same data",
    "checkpoints": "name as output=... a folder that all machines share",
}
PATIENCE_S = 20.0  # for which a rank that has refused its input waits for the others
LONGEST_PAUSE_S = 0.2
ABSENT = object()

_comparisons = 0  # so far in this process; each has its own keys


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison, the same for every rank.

    kind: `same`; `difference`; `mistake`: a rank has refused its input; `failure`: a rank has raised another
    error. rank: the rank with the mistake or failure.
    """

    kind: Literal["same", "difference", "mistake", "failure"]
    line: str = ""
    rank: int = 0

    def dump(self) -> str:
        """Return the bytes for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: bytes) -> "Verdict":
        """Read the bytes from the store."""
        return cls(**json.loads(text))


def first_difference(first: Facts, second: Facts) -> tuple[str, str, Any, Any] | None:
    """Return the first value in which facts differ: its section, its (dotted) key, and both values.

    A section that only one side has is skipped: a rank that refuses its input has not reached it. `ABSENT`
    stands for a missing value.
    """
    for section in WAYS_OUT:
        if section in first and section in second:
            found = _difference(first[section], second[section], "")
            if found is not None:
                return (section, *found)
    return None


def _difference(first: Any, second: Any, key: str) -> tuple[str, Any, Any] | None:
    if isinstance(first, dict) and isinstance(second, dict):
        for name in [*first, *(name for name in second if name not in first)]:
            inner = f"{key}.{name}" if key else name
            found = _difference(first.get(name, ABSENT), second.get(name, ABSENT), inner)
            if found is not None:
                return found
        return None
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        differences = (_difference(*pair, f"{key}[{place}]") for place, pair in pairs)
        return next((found for found in differences if found is not None), None)
    return None if first == second and type(first) is type(second) else (key, first, second)


def check_same(world: launch.World, facts: Facts, timeout_minutes: float) -> None:
    """Return if all ranks have the same facts. Collective, over the store of the rendezvous alone.

    timeout_minutes: how long to wait for ranks that have not arrived.

    Raises:
        CollectiveError: on every rank, with the first value that differs and the two ranks, or with what
            another rank has refused.
        ConnectionError: if another rank has failed, or does not arrive in time.
    """
    if world.size == 1:
        return
    verdict = _Comparison(world, 60 * timeout_minutes, facts).verdict()
    if verdict.kind == "difference":
        raise CollectiveError(verdict.line)
    if verdict.kind == "mistake":
        raise CollectiveError(f"rank {verdict.rank}: {verdict.line}")
    if verdict.kind == "failure":
        raise ConnectionError(f"connection closed by rank {verdict.rank}: {verdict.line}")


@contextmanager
def raise_on_all_ranks(facts: Facts, world: launch.World | None = None) -> Iterator[None]:
    """Context whose errors are also raised on the other ranks, by their `check_same`, instead of a timeout.

    facts: the facts known so far; the body adds to them. If they differ from rank 0's, the difference is
    reported instead of the error.

    Raises:
        CollectiveError: on every rank, with the first value that differs and the two ranks.
    """
    try:
        yield
    except Exception as error:
        verdict = _refuse(error, facts, world)
        if verdict is not None and verdict.kind == "difference":
            raise CollectiveError(verdict.line) from error
        raise


def _refuse(error: Exception, facts: Facts, world: launch.World | None) -> Verdict | None:
    """Return the verdict; None without other ranks, or if none can be reached: this rank's error is then
    raised.
    """
    with suppress(Exception):
        world = world or launch.find_world()
        if world.size > 1:
            text = " ".join(str(error).split())
            mistake = isinstance(error, UserError)
            line = text if mistake else f"{type(error).__name__}: {text}"
            refusal = Verdict("mistake" if mistake else "failure", line, world.rank)
            return _Comparison(world, PATIENCE_S, facts, refusal).verdict()
    return None


class _Comparison:
    """The keys in the store of one comparison.

    They are facts, digest and refusal of rank 0; which ranks have arrived; how many ranks equal rank 0; the
    verdict, written by the first rank that knows it; and which ranks have read it.
    """

    def __init__(
        self, world: launch.World, seconds: float, facts: Facts, refusal: Verdict | None = None
    ) -> None:
        global _comparisons
        _comparisons += 1
        self.world, self.refusal = world, refusal
        self.deadline = time.monotonic() + seconds
        # The store logs every attempt to connect, which would fill the terminal.
        if refusal is not None and not launch.hosts_store(world) and not _wait(_listens, self.deadline):
            raise ConnectionError("nobody hosts the store")
        self.store: Store = PrefixStore(f"comparison_{_comparisons}", launch.open_store(world, seconds))
        self.facts = json.dumps(facts, default=str)

    def verdict(self) -> Verdict:
        """Return the verdict; raise ConnectionError if there is none in time."""
        self.store.set(f"arrived/{self.world.rank}", "")
        digest = hashlib.sha256(self.facts.encode()).hexdigest()
        if self.world.rank == 0:
            self.store.set("facts", self.facts)
            self.store.set("refusal", "" if self.refusal is None else self.refusal.dump())
            self.store.set("digest", digest)
        elif self._is_there("digest"):
            self._compare(digest)
        if not self._is_there("verdict"):
            if self.refusal is None:
                raise ConnectionError(f"timed out waiting for {self._missing()} to start")
            self._publish(self.refusal)
        verdict = Verdict.load(self.store.get("verdict"))
        # Not a counter: `add` would wait for an answer, but the host may already end.
        self.store.set(f"read/{self.world.rank}", "")
        if verdict.kind != "same" and launch.hosts_store(self.world):
            self._let_others_read()
        return verdict

    def _compare(self, digest: str) -> None:
        difference = None
        if digest.encode() != self.store.get("digest"):
            first = json.loads(self.store.get("facts"))
            difference = first_difference(first, json.loads(self.facts))
        if difference is not None:
            self._publish(Verdict("difference", _line(difference, self.world.rank)))
        elif self.refusal is not None:
            self._publish(self.refusal)
        elif self.store.add("alike", 1) == self.world.size - 1:
            refusal = self.store.get("refusal")
            self._publish(Verdict.load(refusal) if refusal else Verdict("same"))

    def _publish(self, verdict: Verdict) -> None:
        """Write the verdict, unless another rank has."""
        self.store.compare_set("verdict", "", verdict.dump())

    def _is_there(self, key: str) -> bool:
        """Return whether the key is written in time. The store answers as soon as it is."""
        left = timedelta(seconds=max(0.001, self.deadline - time.monotonic()))
        try:
            self.store.wait([key], left)
        except DistStoreError:
            return False
        return True

    def _let_others_read(self) -> None:
        """Wait on the store's host until the others have read the verdict; the store ends with its host."""
        now = time.monotonic()
        limit = now + PATIENCE_S if self.refusal is None else max(self.deadline, now + min(1, PATIENCE_S))
        _wait(lambda: self.store.check([f"read/{rank}" for rank in range(self.world.size)]), limit)

    def _missing(self) -> str:
        ranks = [rank for rank in range(self.world.size) if not self.store.check([f"arrived/{rank}"])]
        return f"rank {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"


def _line(difference: tuple[str, str, Any, Any], rank: int) -> str:
    section, key, first, second = difference
    return f"{key}: {_shown(first)} on rank 0, {_shown(second)} on rank {rank}; {WAYS_OUT[section]}"


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    return printable("none" if value is None else value if isinstance(value, str) else json.dumps(value), 60)


def _wait(condition: Callable[[], bool], deadline: float) -> bool:
    """Return whether the condition became true in time."""
    pause = 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return True


def _listens() -> bool:
    """Return whether the store's host listens."""
    port = os.environ.get("MASTER_PORT", "29500")
    address = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(port) if port.isdecimal() else 0
    with suppress(OSError, OverflowError):
        socket.create_connection(address, timeout=1).close()
        return True
    return False
