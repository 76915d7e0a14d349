"""What two micro batches in flight hide: the rows of one travel while the other computes, in both passes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.moe.interleaving import Interleaving
from megamoe.parallel.zero.engine import Engine
from megamoe.train.step import Passes
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run

LAYERS, MICRO_BATCHES = 3, 2
COMPUTES_S, TRAVELS_S = 0.1, 0.08  # the noise of a loaded machine is some ms
RUN: dict[str, Any] = {
    "model__num_layers": LAYERS,
    "moe__layers": {"every": 1},
    "moe__num_shared_experts": 0,
    "parallel__expert": 2,
    "train__global_batch_size": 2 * MICRO_BATCHES,
}
PHASES = ("forward", "backward")
TIMED = 3  # steps
BY_NODE = {"parallel__exchange": "by_node", "parallel__node_size": 1}


class Watch:
    """What a rank does, in its order: (phase, what) with what of `begin`, `wait` and `compute`.

    computes_s: how long attention and experts take in each pass. travels_s: how long rows travel. Both sleep.
    """

    def __init__(self, computes_s: float = 0.0, travels_s: float = 0.0) -> None:
        self.computes_s, self.travels_s = computes_s, travels_s
        self.phase = ""
        self.seconds: dict[str, float] = {}
        self.seen: list[tuple[str, str, int]] = []
        self._number = 0

    def compute(self) -> None:
        self.seen.append((self.phase, "compute", 0))
        time.sleep(self.computes_s)

    def all_to_all(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`dist.all_to_all_single`, in which rows take their time."""

        def delayed(output: Tensor, sent: Tensor, *args: Any, async_op: bool = False, **more: Any) -> Any:
            if not (sent.is_floating_point() and sent.dim() == 2):
                return plain(output, sent, *args, async_op=async_op, **more)
            self._number += 1
            number, begun = self._number, time.perf_counter()
            self.seen.append((self.phase, "begin", number))
            work = plain(output, sent, *args, async_op=True, **more)

            def wait() -> None:
                self.seen.append((self.phase, "wait", number))
                work.wait()
                time.sleep(max(0.0, begun + self.travels_s - time.perf_counter()))

            if async_op:
                return mock.Mock(wait=wait)
            wait()
            return None

        return delayed

    def timed(self, phase: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self.phase, begun = phase, time.perf_counter()
            found = plain(*args, **more)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begun
            return found

        return call

    def attach(self, model: nn.Module) -> None:
        """Let attention, experts and the output layer tell of their passes."""

        def mark(module: nn.Module, inputs: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (_Computes.apply(output[0], self), *output[1:])
            return _Computes.apply(output, self)

        for name, module in model.named_modules():
            if isinstance(module, GroupedExperts) or name.endswith(("self_attention", "output_layer")):
                module.register_forward_hook(mark)

    @contextmanager
    def watching(self, in_flight: int) -> Iterator[None]:
        kind, name = (Passes, "forward") if in_flight == 1 else (Interleaving, "run")
        self.seen.clear()
        self.seconds.clear()
        with (
            mock.patch.object(dist, "all_to_all_single", self.all_to_all(dist.all_to_all_single)),
            mock.patch.object(kind, name, self.timed("forward", getattr(kind, name))),
            mock.patch.object(Engine, "backward", self.timed("backward", Engine.backward)),
        ):
            yield

    def beside(self, phase: str) -> list[bool]:
        """Of each exchange of rows begun in the phase: whether something was computed before its wait."""
        found = []
        for place, (of, what, number) in enumerate(self.seen):
            if (of, what) == (phase, "begin"):
                rest = self.seen[place:]
                until = next(i for i, each in enumerate(rest) if each[1:] == ("wait", number))
                found.append(any(each[1] == "compute" for each in rest[:until]))
        return found


class _Computes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, watch: Watch) -> Tensor:
        ctx.watch = watch
        watch.compute()
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.watch.compute()
        return gradients[0], None


@dataclass(frozen=True)
class Seen:
    """beside, seconds: by phase; seconds: of the fastest of the timed steps."""

    beside: dict[str, list[bool]]
    seconds: dict[str, float]


def watched(several: list[tuple[dict[str, Any], float, float]]) -> list[Seen]:
    """Job: what a step of each (run, computes_s, travels_s) shows."""
    found = []
    for changes, computes_s, travels_s in several:
        trainer = Trainer(small_run(**{**RUN, **changes}))
        watch = Watch()
        watch.attach(trainer.engine.model)
        seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for step in range(1 + TIMED if travels_s or computes_s else 1):
            if step > 0:  # the first one is slower
                watch.computes_s, watch.travels_s = computes_s, travels_s
            with watch.watching(trainer.config.train.in_flight):
                trainer.step()
            for phase in PHASES:
                seconds[phase].append(watch.seconds[phase])
        trainer._stream.close()
        least = {phase: min(times[1:], default=0.0) for phase, times in seconds.items()}
        found.append(Seen({phase: watch.beside(phase) for phase in PHASES}, least))
    return found


def test_something_is_computed_beside_an_exchange(pool: Pool) -> None:
    runs: list[dict[str, Any]] = [{"train__in_flight": 1}, {"train__in_flight": 2}]
    runs.append({"train__in_flight": 2, **BY_NODE, "moe__num_shared_experts": 1})
    for alone, both, by_node in pool.run(watched, [(run, 0.0, 0.0) for run in runs], ranks=2):
        for phase in PHASES:
            exchanges = MICRO_BATCHES * 2 * LAYERS  # out and back
            assert alone.beside[phase] == [False] * exchanges
            assert both.beside[phase] == [True] * exchanges
            assert by_node.beside[phase] == [True] * exchanges


@pytest.mark.full
@pytest.mark.parametrize("exchange", [{}, BY_NODE], ids=["direct", "by_node"])
def test_most_of_a_delay_is_hidden(pool: Pool, exchange: dict[str, Any]) -> None:
    alone, both = {"train__in_flight": 1, **exchange}, {"train__in_flight": 2, **exchange}
    cases = [(run, COMPUTES_S, travels_s) for run in (alone, both) for travels_s in (0.0, TRAVELS_S)]
    delay_s = MICRO_BATCHES * 2 * LAYERS * TRAVELS_S
    for found in pool.run(watched, cases, ranks=2):
        for phase in PHASES:
            seconds = [each.seconds[phase] for each in found]
            shown = 1 - (seconds[1] - seconds[0]) / delay_s, 1 - (seconds[3] - seconds[2]) / delay_s
            print(f"{phase}: {shown[0]:.0%} hidden alone, {shown[1]:.0%} in flight")
            assert shown[0] < 0.3
            assert shown[1] >= 0.7
