"""What two micro batches in flight hide: the rows of one travel while the other computes, in both passes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

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
RUN: dict[str, Any] = {
    "model__num_layers": LAYERS,
    "moe__layers": {"every": 1},
    "moe__num_shared_experts": 0,
    "parallel__expert": 2,
    "train__global_batch_size": 2 * MICRO_BATCHES,
}
PHASES = ("forward", "backward")


class Watch:
    """What a rank does, in its order: (phase, what, number) with what of `begin`, `wait` and `compute`."""

    def __init__(self) -> None:
        self.phase = ""
        self.seen: list[tuple[str, str, int]] = []
        self._number = 0

    def compute(self) -> None:
        self.seen.append((self.phase, "compute", 0))

    def all_to_all(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`dist.all_to_all_single`, with what tells of the rows that it sends."""

        def watched(output: Tensor, sent: Tensor, *args: Any, async_op: bool = False, **more: Any) -> Any:
            if not (sent.is_floating_point() and sent.dim() == 2):
                return plain(output, sent, *args, async_op=async_op, **more)
            self._number += 1
            number = self._number
            self.seen.append((self.phase, "begin", number))
            work = plain(output, sent, *args, async_op=True, **more)

            def wait() -> None:
                self.seen.append((self.phase, "wait", number))
                work.wait()

            if async_op:
                return mock.Mock(wait=wait)
            wait()
            return None

        return watched

    def during(self, phase: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self.phase = phase
            return plain(*args, **more)

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
        with (
            mock.patch.object(dist, "all_to_all_single", self.all_to_all(dist.all_to_all_single)),
            mock.patch.object(kind, name, self.during("forward", getattr(kind, name))),
            mock.patch.object(Engine, "backward", self.during("backward", Engine.backward)),
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


def watched(several: list[dict[str, Any]]) -> list[dict[str, list[bool]]]:
    """Job: of a step of each run, by phase: whether something was computed beside each exchange."""
    found = []
    for changes in several:
        trainer = Trainer(small_run(**{**RUN, **changes}))
        watch = Watch()
        watch.attach(trainer.engine.model)
        with watch.watching(trainer.config.train.in_flight):
            trainer.step()
        trainer._stream.close()
        found.append({phase: watch.beside(phase) for phase in PHASES})
    return found


def test_something_is_computed_beside_an_exchange(pool: Pool) -> None:
    runs: list[dict[str, Any]] = [{"train__in_flight": 1}, {"train__in_flight": 2}]
    by_node = {"parallel__exchange": "by_node", "parallel__node_size": 1}
    runs.append({"train__in_flight": 2, **by_node, "moe__num_shared_experts": 1})
    for found in pool.run(watched, runs, ranks=2):
        for beside, expected in zip(found, (False, True, True), strict=True):
            # Out and back.
            assert beside == dict.fromkeys(PHASES, [expected] * (MICRO_BATCHES * 2 * LAYERS))
