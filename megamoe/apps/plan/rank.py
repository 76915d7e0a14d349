"""One rank of a training run on fake tensors: the real model, engine and step, counted."""

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megamoe.apps.plan.counter import GRADIENTS as PART_OF_GRADIENTS
from megamoe.apps.plan.counter import CostCounter, Counts, Parts
from megamoe.apps.plan.memory import GRADIENTS, OPTIMIZER, PARAMETERS, TEMPORARY, Peak
from megamoe.apps.plan.operators import tensors_in
from megamoe.apps.plan.stand_ins import CountedDispatch, full_sequences, sample_batch, without_values
from megamoe.compat.fake_cuda import (
    FakeCudaMode,
    fake_torch_cuda,
    fakes_are_drawn,
    fused_operators,
    join_fake_group,
    modules_move_fakes,
    unknown_sizes_raise,
)
from megamoe.config import RunConfig
from megamoe.data.batches import Batch
from megamoe.errors import UserError
from megamoe.kernels.attention.rotary import angles
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.build import build_model
from megamoe.moe.layer import device_scalar
from megamoe.moe.part import StepContext
from megamoe.moe.routing import tokens_and_choices
from megamoe.moe.suggestions import provides
from megamoe.parallel import launch
from megamoe.parallel.groups import start_groups
from megamoe.parallel.zero.deepspeed_moe_layer import moe_layer_factory
from megamoe.parallel.zero.engine import Engine
from megamoe.parallel.zero.partition import Partition, num_parameters, weights_of, zero_without_values
from megamoe.train.resolved import ResolvedRun, resolve_run
from megamoe.train.step import train_step

UNKNOWN_SIZES = (
    "simulation: the router's number of pairs depends on the tokens, which have no values here; take a "
    "selector of a fixed number, such as top_k, and capacity: none"
)


@dataclass(frozen=True)
class StepCosts:
    """Of one optimiser step on one rank, after the first. Bytes of states are those between two steps.

    parameters: their number on this rank. gradient_bytes: what the backward pass has left when it ends.
    buffer_bytes: what of that is left after the update. host: bytes of offloaded states by category.
    tokens: of this rank's micro batches. load: see `simulate_step`.
    peaks: by phase. middle: counts of the step up to the end of its first micro batch, and of its second one,
    if it has three or more.
    """

    counts: Counts
    peak: Peak
    peaks: dict[str, Peak]
    middle: tuple[Counts, Counts] | None
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    host: dict[str, int]
    tokens: int
    load: float


class CountedEngine(Engine):
    """An engine that tells the counter which phase of the step runs."""

    counter: CostCounter
    before: list[Counts]  # each micro batch of this step
    gradient_bytes: int  # at the end of the last backward pass

    def forward(self, **inputs: Any) -> Any:
        """See `Engine`."""
        self.before.append(copy.deepcopy(self.counter.counts))
        self.counter.memory.begin_forward()
        with self._phase("forward"):
            return super().forward(**inputs)

    def backward(self, loss: Tensor, last: bool, completes: bool | None = None) -> None:
        """See `Engine`."""
        self.counter.memory.end_forward()
        with self._phase("backward"), self.counter.parts.inside(PART_OF_GRADIENTS):
            super().backward(loss, last, completes)
        # What a backward pass leaves are gradients, under whatever name DeepSpeed holds them.
        for memory in (self.counter.memory, self.counter.host):
            memory.name_rest(GRADIENTS, of=TEMPORARY)
        self.gradient_bytes = self.counter.memory.live_bytes(GRADIENTS)

    def step(self, lr: float, apply_update: bool = True) -> float:
        """See `Engine`."""
        with self._phase("optimizer"), self.counter.parts.inside("optimizer"):
            return super().step(lr, apply_update)

    def name_states(self) -> None:
        """Say what weights, masters and moments are; the other states are buffers of gradients."""
        masters = [tensor for shard in self.optimizer_shards() for tensor in shard.tensors]
        moments = tensors_in(list(self.inner_optimizer.state.values()))
        states = [tensor.detach() for tensor in [*masters, *moments]]
        for memory in (self.counter.memory, self.counter.host):
            memory.name_rest(GRADIENTS, of=TEMPORARY)
            memory.name(states, OPTIMIZER)
            memory.name(weights_of(self.model), PARAMETERS)

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        before, self.counter.phase = self.counter.phase, phase
        self.counter.memory.begin_phase(phase)
        try:
            yield
        finally:
            self.counter.phase = before
            self.counter.memory.begin_phase(before)


def simulate_step(
    config: RunConfig, ranks: int, load: float = 1.0, micro_batches: int = 1, device: str = "cuda"
) -> StepCosts:
    """Count the second step of rank 0 of so many ranks, on a fake device.

    load: rows that the experts of this rank get, over the mean of all ranks. device: cuda, for which
    `cuda_device.load` comes first, or cpu, with the operators of a CPU, as real ranks can be compared with.
    The process may not be in a process group.

    Raises:
        UserError: for a configuration that training would refuse.
    """
    on_cuda = device == "cuda"
    world = launch.World(0, ranks, 0, torch.device("cuda:0" if on_cuda else "cpu"), "fake")
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    config.model.cpu_kernels = "plain"
    with fake_torch_cuda() if on_cuda else nullcontext():
        run = resolve_run(config, ranks)
    if run.plan.layout.pipeline > 1:
        raise UserError(
            f"parallel.pipeline: found {run.plan.layout.pipeline}, which is not simulated: a plan knows the "
            "step of a whole model only; set it to 1"
        )
    _check_load(load, run.plan.layout.expert)
    sample = sample_batch(run)
    join_fake_group(0, ranks)
    for cached in (angles, tokens_and_choices, device_scalar):
        cached.cache_clear()  # what an earlier simulation has left there would not be counted here
    with ExitStack() as stack:
        stack.enter_context(unknown_sizes_raise(UserError(UNKNOWN_SIZES)))
        # In this thread, whose settings for fakes the threads of the autograd engine do not have.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for patch in (fake_torch_cuda(), fused_operators()) if on_cuda else ():
            stack.enter_context(patch)
        for each in (full_sequences(), zero_without_values(), modules_move_fakes(), fake_mode()):
            stack.enter_context(each)
        stack.callback(launch.stop)
        launch.start(world, config.parallel.timeout_minutes)
        groups = start_groups(run.plan.layout, config.parallel.timeout_minutes)
        context = StepContext(seed=config.seed, data_group=groups.data if run.plan.layout.data > 1 else None)
        factory = moe_layer_factory(config.moe, context, groups, run.plan.layout)
        with torch.device(device), fakes_are_drawn():
            model = build_model(config, run.vocabulary.size, factory, _partition(run), groups.context)
        parts = Parts(model)
        for _, layer in model.moe_layers():
            layer.dispatcher = CountedDispatch(layer.dispatcher, load, parts)  # type: ignore[assignment]
        counter = CostCounter(parts, on_cuda)
        router = config.moe.router
        shares = run.plan.layout.batch_ranks  # of a micro batch's tokens
        if shares > 1 and not router.masks and provides("dropless", router.capacity):
            counter.kept = 1 / shares
        stack.enter_context(parts.followed())
        stack.enter_context(counter)
        return _count(config, run, sample, world, model, context, counter, micro_batches, load)


def _check_load(load: float, expert: int) -> None:
    if load == 1 or 1 < load <= expert:
        return
    if expert == 1:
        raise UserError(
            f"--load: found {load:g}, expected 1: parallel.expert is 1, all ranks hold all experts"
        )
    most = f"1 to {expert}, the ranks of parallel.expert"
    raise UserError(f"--load: found {load:g}, expected {most}: one of them cannot have more than all rows")


def _offloaded(run: ResolvedRun, counter: CostCounter) -> dict[str, int]:
    """Return bytes on the host by category; none without offload, when nothing of it is a state."""
    if run.plan.offload.optimizer == "none":
        return {}
    return {name: counter.host.live_bytes(name) for name in (PARAMETERS, GRADIENTS, OPTIMIZER)}


def _partition(run: ResolvedRun) -> Callable[[str, nn.Module], None] | None:
    """Return what cuts each part of a model as soon as it is built, at ZeRO 3."""
    if run.plan.stage < 3:
        return None
    cut = Partition(run.filled, run.plan.precision)
    return lambda prefix, module: cut(module)


@cache
def fake_mode() -> FakeCudaMode:
    """One for all simulations of a process: caches of the program may keep fakes from one to the next."""
    return FakeCudaMode()


def _count(
    config: RunConfig,
    run: ResolvedRun,
    sample: Batch,
    world: launch.World,
    model: LanguageModel,
    context: StepContext,
    counter: CostCounter,
    micro_batches: int,
    load: float,
) -> StepCosts:
    memory = counter.memory
    for tensor in weights_of(model):
        counter.memory_of(tensor).add(tensor, PARAMETERS, "model")
    counter.phase = "start"
    engine = CountedEngine(config, model, world, run.plan, run.filled)
    engine.counter = counter
    engine.train(True)
    counter.phase = "step"
    memory.begin_phase("step")
    batch = without_values(sample)
    for number in (1, 2):
        context.step = number
        engine.before = []
        if number == 2:
            counter.counts = Counts()
            memory.start()
        train_step(
            engine,
            context,
            [batch] * (micro_batches if number == 2 else 1),
            config.optimizer.lr,
            config.train.label_smoothing,
        )
        if engine.step_skipped:
            raise RuntimeError("the simulated step was skipped, so its update of the weights is not counted")
        engine.name_states()
    peaks = memory.peaks_by_phase()
    return StepCosts(
        counter.counts,
        max(peaks.values(), key=lambda peak: peak.bytes),
        peaks,
        (engine.before[1], engine.before[2]) if micro_batches > 2 else None,
        num_parameters(model),
        memory.live_bytes(PARAMETERS),
        memory.live_bytes(OPTIMIZER),
        engine.gradient_bytes,
        memory.live_bytes(GRADIENTS),
        _offloaded(run, counter),
        micro_batches * batch.tokens_BS.numel(),
        load,
    )
