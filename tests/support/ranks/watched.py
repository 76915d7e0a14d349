"""What a real rank holds and sends in its second step, seen at every operator."""

import gc
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.fake_collectives import CollectiveOp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megamoe.config import RunConfig
from megamoe.kernels.attention.rotary import angles
from megamoe.moe.auxiliary_losses import device_scalar
from megamoe.moe.dispatch import by_node as between_nodes
from megamoe.moe.dispatch import direct as all_to_all
from megamoe.moe.routing import tokens_and_choices
from megamoe.parallel import launch
from megamoe.parallel.zero.engine import Engine
from megamoe.parallel.zero.partition import weights_of
from megamoe.train import step
from megamoe.train import trainer as trainer_module
from megamoe.train.step_record import StepRecord, merged_over_stages
from megamoe.train.trainer import Trainer
from tests.support.apps.planned_states import rows_are_not_padded

SETTLED = 10  # looks, 20 ms apart, in which nothing was freed


class Watch(TorchDispatchMode):
    """Storages that operators make, by the phase in which they are made, and bytes of collectives.

    live: (bytes, phase) by storage. sent: by kind and number of ranks, while `counts` says so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "start"
        self.live: dict[int, tuple[int, str]] = {}
        self.sent: Counter[str] = Counter()
        self.most = 0
        self.counts = True
        self._bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and take in the storages of its results that are not those of its arguments."""
        known = {storage_of(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        result = function(*args, **(kwargs or {}))
        name = function.name()
        if name.startswith("c10d::") and "barrier" not in name and "recv" not in name and self.counts:
            group = CollectiveOp.get_process_group(function, args)
            kind = name.removeprefix("c10d::").partition(".")[0].strip("_")
            sizes = [sum(t.nbytes for t in tree_leaves(arg) if isinstance(t, Tensor)) for arg in args]
            self.sent[f"{kind} of {dist.get_world_size(group)}"] += max(sizes)
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and not value.is_meta and storage_of(value) not in known:
                self._add(value)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), storage_of(tensor)
        if key in self.live:
            return
        self.live[key] = storage.nbytes(), self.phase
        self._bytes += storage.nbytes()
        self.most = max(self.most, self._bytes)
        weakref.finalize(storage, self._free, key).atexit = False

    def _free(self, key: int) -> None:
        self._bytes -= self.live.pop(key)[0]

    def start(self) -> None:
        """Look for the peak from here on, and count what is sent."""
        gc.collect()
        self.most = self._bytes
        self.sent.clear()

    def held(self, *phases: str) -> dict[int, int]:
        """Bytes of the live storages that these phases made."""
        self._settle()
        return {key: size for key, (size, phase) in self.live.items() if phase in phases}

    def _settle(self) -> None:
        """Wait until nothing is freed any more.

        A thread of gloo may hold the tensors of a collective for a moment after its caller has gone on.
        """
        gc.collect()
        before, unchanged = len(self.live), 0
        while unchanged < SETTLED:
            time.sleep(0.02)
            unchanged = unchanged + 1 if len(self.live) == before else 0
            before = len(self.live)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What is made inside belongs to this phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


class WatchedEngine(Engine):
    """An engine that tells the watch which phase runs, and what it holds beside the states when the backward
    pass of the last micro batch ends.
    """

    watch: Watch
    gradients: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with self.watch.during("engine"):
            super().__init__(*args, **kwargs)

    def forward(self, **inputs: Any) -> Any:
        """See `Engine`."""
        with self.watch.during("forward"):
            return super().forward(**inputs)

    def backward(self, loss: Tensor, last: bool, completes: bool | None = None) -> None:
        """See `Engine`."""
        with self.watch.during("backward"):
            super().backward(loss, last, completes)
        self.gradients = self.held_beside_states()

    def finish_gradients(self) -> None:
        """See `Engine`; without the gradients of hidden states that are on their way to another stage."""
        self.links.finish()
        self.gradients = self.held_beside_states()
        with self.watch.during("backward"):
            super().finish_gradients()

    def step(self, lr: float, apply_update: bool = True, squares: float | None = None) -> float:
        """See `Engine`."""
        with self.watch.during("optimizer"):
            return super().step(lr, apply_update, squares)

    def held_beside_states(self) -> int:
        """Return the bytes of what the engine has made and holds: gradients, and buffers for them."""
        held = self.watch.held("engine", "backward", "optimizer")
        known = {key for part in states_of(self).values() for key in part}
        return sum(size for key, size in held.items() if key not in known)


def measure(runs: Sequence[RunConfig]) -> list[dict[str, Any]]:
    """Job: what this rank holds and sends in the second step of each run, one after the other in one world.

    parameters: weights and buffers. optimizer: masters and moments. gradients: what else the engine holds
    when the backward pass ends. buffers: the same after the step. most: beyond what is held when the step
    begins. sent: of collectives, by kind and ranks.
    """
    try:
        return [_measured(config) for config in runs]
    finally:
        launch.stop()


def _measured(config: RunConfig) -> dict[str, Any]:
    for cached in (angles, tokens_and_choices, device_scalar):
        cached.cache_clear()  # what an earlier run has left there would not be seen here
    watch = Watch()
    engine_class = type("Watched", (WatchedEngine,), {"watch": watch})
    counts: list[dict[str, list[int]]] = []

    def read_counts(vectors: Mapping[str, Tensor]) -> dict[str, list[int]]:
        counts.append(read(vectors))
        return counts[-1]

    def merged(*arguments: Any) -> StepRecord:
        """Objects of an unknown size, which a plan does not count."""
        watch.counts = False
        try:
            return merged_over_stages(*arguments)
        finally:
            watch.counts = True

    read = all_to_all.read_counts
    with (
        patch.object(trainer_module, "Engine", engine_class),
        patch.object(all_to_all, "read_counts", read_counts),
        patch.object(between_nodes, "read_counts", read_counts),
        patch.object(step, "merged_over_stages", merged),
        rows_are_not_padded(),
        watch,
    ):
        trainer = Trainer(config)
        trainer.step()
        trainer.step()  # in which ZeRO 3 compares over the ranks, once
        watch.start()
        before = watch.most
        counts.clear()
        trainer.step()
        engine: Any = trainer.engine
        sizes = {name: sum(part.values()) for name, part in states_of(engine).items()}
        found = {**sizes, "gradients": engine.gradients, "buffers": engine.held_beside_states()}
        trainer._stream.close()
        trainer.saver.checkpoints.close()
    return {**found, "most": watch.most - before, "sent": dict(watch.sent), "counts": counts}


def states_of(engine: Engine) -> dict[str, dict[int, int]]:
    """Bytes by storage: of weights and buffers, and of masters and moments."""
    masters = [tensor for shard in engine.optimizer_shards() for tensor in shard.tensors]
    moments = tree_leaves(list(engine.inner_optimizer.state.values()))
    of_parameters = _by_storage(weights_of(engine.model))
    of_optimizer = _by_storage([each for each in [*masters, *moments] if isinstance(each, Tensor)])
    # At ZeRO 0 in fp32 the weights are their own masters.
    return {
        "parameters": of_parameters,
        "optimizer": {key: size for key, size in of_optimizer.items() if key not in of_parameters},
    }


def _by_storage(tensors: list[Tensor]) -> dict[int, int]:
    return {storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def storage_of(tensor: Tensor) -> int:
    """What tensors that share their memory have in common."""
    return int(tensor.untyped_storage()._cdata)
