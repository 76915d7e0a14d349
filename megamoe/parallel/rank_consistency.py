"""All ranks start alike, or none does: what each is about to do is compared before they join a process group.

A rank publishes what it knows of its run as facts, sections of plain data by name, in the key-value store of
the rendezvous. It compares them with rank 0's, at first by a digest. Where a rank differs from rank 0, or has
refused its own input, every rank is told and raises, and none waits for one that will not come. A process
group would be too late: a difference can keep ranks from joining one.
"""

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.distributed import PrefixStore, Store

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
    """What every rank is told.

    kind: `same`; `difference`; `mistake`: a rank has refused its input; `failure`: it has raised otherwise.
    rank: whose mistake or failure it is.
    """

    kind: Literal["same", "difference", "mistake", "failure"]
    line: str = ""
    rank: int = 0

    def dump(self) -> str:
        """As the store has it."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: bytes) -> "Verdict":
        """From the store."""
        return cls(**json.loads(text))


def first_difference(first: Facts, second: Facts) -> tuple[str, str, Any, Any] | None:
    """The first value in which facts differ: its section, its key, which may be dotted, and both values.

    A section that only one has is passed over: a rank that refuses its input has not come to it. `ABSENT`
    stands for a value that is not there.
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

    timeout_minutes: how long to wait for ranks that have not come yet.

    Raises:
        CollectiveError: on every rank, with the first value that differs and the two ranks, or with what
            another rank has refused.
        ConnectionError: if another rank has failed, or does not come in time.
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
def refusing_together(facts: Facts, world: launch.World | None = None) -> Iterator[None]:
    """What this rank raises inside, the other ranks raise in their `check_same`, instead of waiting for it.

    facts: those known so far, which the body fills. Where they say that this rank is started otherwise than
    rank 0, that is told instead.

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
    """None where there is nobody else, or nobody can be reached: this rank's own error is what counts."""
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
    """Keys: facts, digest and refusal of rank 0; who has arrived; how many ranks are like rank 0; the
    verdict, which the first rank that knows it writes; who has read it.
    """

    def __init__(
        self, world: launch.World, seconds: float, facts: Facts, refusal: Verdict | None = None
    ) -> None:
        global _comparisons
        _comparisons += 1
        self.world, self.refusal = world, refusal
        self.deadline = time.monotonic() + seconds
        # The store's own attempts to connect would fill the terminal.
        if refusal is not None and not launch.hosts_store(world) and not _wait(_listens, self.deadline):
            raise ConnectionError("nobody hosts the store")
        self.store: Store = PrefixStore(f"comparison_{_comparisons}", launch.open_store(world, seconds))
        self.facts = json.dumps(facts, default=str)

    def verdict(self) -> Verdict:
        """Raises ConnectionError if it cannot be had in time."""
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
        # Not a counter: that would wait for an answer, while the host may end.
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
        """Unless another rank has."""
        self.store.compare_set("verdict", "", verdict.dump())

    def _is_there(self, key: str) -> bool:
        return _wait(lambda: self.store.check([key]), self.deadline)

    def _let_others_read(self) -> None:
        """The store ends with its host."""
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
    """Whether it has come true in time."""
    pause = 0.005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return True


def _listens() -> bool:
    """Whether anybody does where the store will be."""
    address = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    with suppress(OSError):
        socket.create_connection(address, timeout=1).close()
        return True
    return False
