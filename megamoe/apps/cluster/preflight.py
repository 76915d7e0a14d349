"""Compares nodes before training, over the store of the rendezvous, and names the bad ones.

Every rank (one a node) publishes its report under `report/<rank>`. Rank 0 waits for them, judges, and
publishes the verdict. A rank that does not report in time is a bad node, and nobody waits for it.
"""

import hashlib
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store

from megamoe.apps.cluster.checks import existing, measure_pairs, rounds_of_pairs, slow_ranks
from megamoe.errors import ExitCode
from megamoe.parallel import launch
from megamoe.parallel.rank_consistency import WAYS_OUT, Facts, first_difference
from megamoe.redaction import line_of
from megamoe.resilience.run_status import host_name

ARRIVAL_S = 25.0  # for all nodes to report
LINKS_S = 25.0  # for the bandwidths
CLOCKS_S = 2.0  # two clocks may differ by so much: times of files and logs are compared
MARK = ".preflight_mark"  # of rank 0, which the others must see in the output folder

Speeds = dict[tuple[int, int], tuple[float, float]]
Measure = Callable[[], Speeds]


@dataclass
class NodeReport:
    """What a node found. speeds: of all-reduce and all-to-all with other ranks, in GB/s, by `rank-rank`."""

    node: str
    problems: list[str] = field(default_factory=list)
    speeds: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass
class Outcome:
    """The verdict. bad: the problems of each bad node, by its name; mistake: what is wrong on all nodes."""

    nodes: int
    bad: dict[str, list[str]] = field(default_factory=dict)
    mistake: list[str] = field(default_factory=list)
    speeds: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def code(self) -> ExitCode:
        """1 for a bad node, 2 for a user's mistake."""
        if self.bad:
            return ExitCode.UNEXPECTED
        return ExitCode.MISTAKE if self.mistake else ExitCode.FINISHED


class Exchange:
    """The reports of all ranks in the store, from the point of view of one rank."""

    def __init__(self, world: launch.World) -> None:
        self.world = world
        self.store: Store = PrefixStore("preflight", launch.open_store(world, ARRIVAL_S))

    def publish(self, stage: str, content: Any) -> None:
        """Write this rank's content of a stage."""
        self.store.set(f"{stage}/{self.world.rank}", json.dumps(content))

    def gather(self, stage: str, seconds: float) -> dict[int, Any]:
        """Return what the ranks have written within so many seconds, by rank."""
        until, found = time.monotonic() + seconds, {}
        for rank in range(self.world.size):
            left = timedelta(seconds=max(0.01, until - time.monotonic()))
            with suppress(DistError):
                self.store.wait([f"{stage}/{rank}"], left)
                found[rank] = json.loads(self.store.get(f"{stage}/{rank}"))
        return found

    def share(self, outcome: Outcome | None, seconds: float) -> Outcome:
        """Publish the outcome on rank 0; return it on the others. Rank 0 waits until they have read it."""
        if outcome is not None:
            self.store.set("outcome", json.dumps(asdict(outcome)))
            self.publish("read", True)
            self.gather("read", 2.0)
            return outcome
        self.store.wait(["outcome"], timedelta(seconds=seconds))
        outcome = Outcome(**json.loads(self.store.get("outcome")))
        self.publish("read", True)
        return outcome


def compare_facts(all_facts: dict[int, Facts]) -> dict[int, str]:
    """Return the ranks whose facts differ from those of most ranks, with the first difference.

    With as many ranks on either side, those that differ from rank 0 are named.
    """
    digests = {rank: hashlib.sha256(json.dumps(it).encode()).hexdigest() for rank, it in all_facts.items()}
    counts = Counter(digests.values())
    most = max(counts, key=lambda digest: (counts[digest], digest == digests[min(digests)]))
    usual = next(rank for rank, digest in digests.items() if digest == most)
    found = {}
    for rank, digest in digests.items():
        difference = None if digest == most else first_difference(all_facts[usual], all_facts[rank])
        if difference is not None:
            section, key, expected, value = difference
            found[rank] = f"{key} is {value}, on most nodes {expected}; {WAYS_OUT[section]}"
    return found


def judge(reports: dict[int, NodeReport], missing: list[str], slow: dict[int, str]) -> Outcome:
    """Return the outcome. A problem that all of several nodes have is the user's mistake, not theirs."""
    outcome = Outcome(len(reports) + len(missing))
    common = set.intersection(*(set(report.problems) for report in reports.values())) if reports else set()
    if outcome.nodes > 1 and not missing:
        outcome.mistake = sorted(common)
    for rank, report in reports.items():
        problems = [it for it in report.problems if it not in outcome.mistake]
        problems += [slow[rank]] if rank in slow else []
        if problems:
            outcome.bad[report.node] = problems
        outcome.speeds |= report.speeds
    for node in missing:
        outcome.bad[node] = [f"did not report within {ARRIVAL_S:.0f} s"]
    return outcome


@dataclass
class Preflight:
    """The checks of all nodes. facts, problems: of this node. rounds: of pairs to measure."""

    world: launch.World
    facts: Facts
    problems: list[str]
    output: Path
    rounds: int
    factor: float

    def run(self) -> Outcome:
        """Return the outcome, the same on all ranks. Collective over the store.

        Raises:
            DistError: if rank 0 cannot be reached.
        """
        if self.world.size == 1:
            return judge({0: NodeReport(host_name(), self.problems)}, [], {})
        exchange = Exchange(self.world)
        exchange.publish("report", {"node": host_name(), "problems": self.problems, "facts": self.facts})
        if self.world.is_first:
            return self._lead(exchange)
        exchange.store.wait(["go"], timedelta(seconds=2 * ARRIVAL_S))
        if exchange.store.get("go") == b"yes":
            exchange.publish("links", self._links(exchange))
        return exchange.share(None, LINKS_S + ARRIVAL_S)

    def _lead(self, exchange: Exchange) -> Outcome:
        """Do rank 0's part: gather, judge and publish the outcome."""
        found = exchange.gather("report", ARRIVAL_S)
        reports = {rank: NodeReport(it["node"], it["problems"]) for rank, it in found.items()}
        for rank, line in compare_facts({rank: it["facts"] for rank, it in found.items()}).items():
            reports[rank].problems.append(line)
        missing = _missing({report.node for report in reports.values()}, self.world.size - len(found))
        if missing:
            exchange.store.set("go", "no")
            return exchange.share(judge(reports, missing, {}), 0)
        with suppress(OSError):
            self._mark().touch()
        exchange.store.set("go", "yes")
        exchange.publish("links", self._links(exchange))
        links = exchange.gather("links", LINKS_S)
        speeds: Speeds = {}
        for rank, it in links.items():
            reports[rank].problems += it["problems"]
            if abs(it["time"] - links[0]["time"]) > CLOCKS_S:
                reports[rank].problems.append(f"its clock is {it['time'] - links[0]['time']:+.1f} s off")
            for pair, both in it["speeds"].items():
                first, second = map(int, pair.split("-"))
                speeds[first, second] = both
                reports[rank].speeds[f"{reports[first].node}-{reports[second].node}"] = both
        for rank in reports.keys() - links.keys():
            reports[rank].problems.append("did not finish the test of the network")
        with suppress(OSError):
            self._mark().unlink()
        return exchange.share(judge(reports, [], slow_ranks(speeds, self.factor)), 0)

    def _links(self, exchange: Exchange) -> dict[str, Any]:
        """Return this rank's second report: its time, problems of the shared folder, and bandwidths."""
        now, problems = time.time(), []
        if not self.world.is_first and not self.problems and not _appears(self._mark()):
            problems.append(f"output {self.output}: does not show a file of the first node; share the folder")
        speeds: Speeds = {}
        try:
            dist.init_process_group(
                self.world.backend,
                store=PrefixStore("links", exchange.store),
                rank=self.world.rank,
                world_size=self.world.size,
                timeout=timedelta(seconds=LINKS_S),
            )
            rounds = rounds_of_pairs(self.world.size, self.rounds)
            speeds = measure_pairs(self.world.rank, rounds, self.world.device)
        except RuntimeError as error:
            name = "NCCL_SOCKET_IFNAME" if self.world.backend == "nccl" else "GLOO_SOCKET_IFNAME"
            text = line_of(error)[:160]
            problems.append(f"{self.world.backend} cannot exchange tensors ({text}); set {name}")
        named = {f"{first}-{second}": both for (first, second), both in speeds.items()}
        return {"time": now, "problems": problems, "speeds": named}

    def _mark(self) -> Path:
        return existing(self.output) / f"{MARK}_{os.environ.get('SLURM_JOB_ID', '0')}"


def _appears(path: Path) -> bool:
    """Return whether a file exists within seconds; network file systems show new files late."""
    until = time.monotonic() + 5
    while not path.exists():
        if time.monotonic() > until:
            return False
        os.listdir(path.parent)  # makes NFS look again
        time.sleep(0.2)
    return True


def _missing(present: set[str], count: int) -> list[str]:
    """Return the names of the nodes that did not report; Slurm knows them, otherwise only their number."""
    if not count:
        return []
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        absent = [name for name in done.stdout.split() if name not in present]
        if absent:
            return absent
    return [f"{count} unknown"]
