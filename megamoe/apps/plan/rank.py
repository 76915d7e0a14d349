"""One rank of a training run on fake tensors: the real model, engine and step, counted."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.apps.plan.counter import GRADIENTS as PART_OF_GRADIENTS
from megamoe.apps.plan.counter import CostCounter, Counts, Parts
from megamoe.apps.plan.fake_cuda import (
    FakeCudaMode,
    fake_torch_cuda,
    fakes_are_drawn,
    fused_operators,
    join_fake_group,
    modules_move_fakes,
    objects_are_alike,
    unknown_sizes_raise,
)
from megamoe.apps.plan.memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, TEMPORARY, Peak
from megamoe.apps.plan.operators import tensors_in
from megamoe.apps.plan.stand_ins import (
    CountedDispatch,
    full_sequences,
    sample_batch,
    stages_that_send,
    without_values,
)
from megamoe.compat import replaced
from megamoe.config import RunConfig
from megamoe.config.layer_kinds import config_by_layer, kinds
from megamoe.config.shapes import recomputed_modules
from megamoe.data.batches import Batch
from megamoe.errors import UserError
from megamoe.kernels.attention.rotary import angles
from megamoe.model.architectures.decoder import GPT
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.block_specs import MoEFactory
from megamoe.model.build import build_model
from megamoe.model.stage import StageBlocks, drop_other_blocks
from megamoe.moe.auxiliary_losses import device_scalar
from megamoe.moe.capabilities import provides
from megamoe.moe.dispatch.choice import mean_nodes
from megamoe.moe.part import StepContext
from megamoe.moe.router import mean_choices
from megamoe.moe.routing import tokens_and_choices
from megamoe.parallel import launch
from megamoe.parallel.layout import Layout
from megamoe.parallel.pipeline.schedule import Pass
from megamoe.parallel.process_groups import start_groups
from megamoe.parallel.zero.deepspeed_moe_layer import moe_layer_factory
from megamoe.parallel.zero.engine import Engine
from megamoe.parallel.zero.partition import Partition, num_parameters, weights_of, zero_without_values
from megamoe.train.resolved import ResolvedRun, resolve_run
from megamoe.train.step import Passes, train_step

UNKNOWN_SIZES = (
    "simulation: the router's number of pairs depends on the tokens, which have no values here; take a "
    "selector of a fixed number, such as top_k, and capacity: none"
)


@dataclass(frozen=True)
class StepCosts:
    """The costs of one optimiser step on one rank, after the first. Bytes of states are those between two
    steps.

    parameters: their number on this rank. gradient_bytes: what the backward pass has left when it ends.
    buffer_bytes: what of that is left after the update. host: bytes of offloaded states by category.
    tokens: of this rank's micro batches. load: see `simulate_step`. peaks: by phase. passes: counts of each
    pass alone, which those of the step include. kept_bytes: what the forward pass of a micro batch leaves for
    its backward pass. in_flight: micro batches whose passes take turns. travel_ranks: the group of the
    experts' exchange, between nodes if it is by node. exchanges_again: the backward pass repeats exchanges.
    """

    counts: Counts
    peaks: dict[str, Peak]
    passes: dict[Pass, Counts]
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    buffer_bytes: int
    host: dict[str, int]
    tokens: int
    load: float
    kept_bytes: int = 0
    in_flight: int = 1
    travel_ranks: tuple[int, ...] = ()
    exchanges_again: bool = False

    @property
    def peak(self) -> Peak:
        """The largest of the phases' peaks."""
        return max(self.peaks.values(), key=lambda peak: peak.bytes)

    @property
    def micro_batches(self) -> int:
        """Their number."""
        return 1 + max(each.micro_batch for each in self.passes)

    def middle(self) -> dict[Pass, Counts]:
        """Return the passes of one micro batch; of three or more, of one that is neither first nor last."""
        chosen = 1 if self.micro_batches > 2 else 0
        return {each: counts for each, counts in self.passes.items() if each.micro_batch == chosen}


class CountedEngine(Engine):
    """An engine that tells the counter which phase of the step runs."""

    counter: CostCounter
    gradient_bytes: int  # at the end of the last backward pass

    def forward(self, **inputs: Any) -> Any:
        """See `Engine`."""
        self.counter.memory.end_forward()  # of a micro batch whose backward pass is still to come
        with self.counter.during("forward"):
            return super().forward(**inputs)

    def backward(self, loss: Tensor, last: bool, completes: bool | None = None) -> None:
        """See `Engine`."""
        self.counter.memory.end_forward()
        with self.counter.during("backward"), self.counter.parts.inside(PART_OF_GRADIENTS):
            super().backward(loss, last, completes)
        # What a backward pass leaves are gradients, under whatever name DeepSpeed holds them.
        for memory in (self.counter.memory, self.counter.host):
            memory.name_rest(GRADIENTS, of=TEMPORARY)
        self.gradient_bytes = self.counter.memory.live_bytes(GRADIENTS)

    def finish_gradients(self) -> None:
        """See `Engine`."""
        self.links.finish()
        self.gradient_bytes = self.counter.memory.live_bytes(GRADIENTS)
        with self.counter.during("backward"), self.counter.parts.inside(PART_OF_GRADIENTS):
            super().finish_gradients()

    def step(self, lr: float, apply_update: bool = True, squares: float | None = None) -> float:
        """See `Engine`."""
        with self.counter.during("optimizer"), self.counter.parts.inside("optimizer"):
            return super().step(lr, apply_update, squares)

    def name_states(self) -> None:
        """Say what weights, masters and moments are; the other states are buffers of gradients."""
        masters = [tensor for shard in self.optimizer_shards() for tensor in shard.tensors]
        moments = tensors_in(list(self.inner_optimizer.state.values()))
        states = [tensor.detach() for tensor in [*masters, *moments]]
        for memory in (self.counter.memory, self.counter.host):
            memory.name_rest(GRADIENTS, of=TEMPORARY)
            memory.name(states, OPTIMIZER)
            memory.name(weights_of(self.model), PARAMETERS)


def simulate_step(
    config: RunConfig,
    ranks: int,
    load: float = 1.0,
    micro_batches: int = 1,
    device: str = "cuda",
    stage: int = 0,
) -> StepCosts:
    """Count the second step of the first rank of a pipeline stage, of so many ranks, on a fake device.

    load: rows that the experts of this rank get, over the mean of all ranks. device: cuda, for which
    `cuda_device.load` comes first, or cpu, with the operators of a CPU, as real ranks can be compared with.
    The process may not be in a process group.

    Raises:
        UserError: for a configuration that training would refuse.
    """
    on_cuda = device == "cuda"
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    config.model.cpu_kernels = "plain"
    in_flight, config = config.train.in_flight, replace(config, train=replace(config.train, in_flight=1))
    with fake_torch_cuda() if on_cuda else nullcontext():
        run = resolve_run(config, ranks)
    rank = stage * run.plan.layout.stage_ranks
    world = launch.World(rank, ranks, 0, torch.device("cuda:0" if on_cuda else "cpu"), "fake")
    _check_load(load, run.plan.layout.expert)
    sample = sample_batch(run)
    join_fake_group(rank, ranks)
    for cached in (angles, tokens_and_choices, device_scalar):
        cached.cache_clear()  # what an earlier simulation has left there would not be counted here
    with ExitStack() as stack:
        for context_manager in _stand_ins(on_cuda):
            stack.enter_context(context_manager)
        stack.callback(launch.stop)
        launch.start(world, config.parallel.timeout_minutes)
        groups = start_groups(run.plan.layout, config.parallel.timeout_minutes)
        context = StepContext(seed=config.seed, data_group=groups.data if run.plan.layout.data > 1 else None)
        factory = moe_layer_factory(context, groups, run.plan.layout)
        with torch.device(device), fakes_are_drawn():
            model = _start_model(config, run, stage, factory, groups.context)
        parts = Parts(model)
        _count_dispatches(config, run, model, load, parts)
        counter = CostCounter(parts, on_cuda)
        counter.kept = _kept(config, run.plan.layout.batch_ranks)
        passes = stack.enter_context(passes_counted(counter))
        for context_manager in (stages_that_send(parts, counter), parts.followed(), counter):
            stack.enter_context(context_manager)
        engine = _two_steps(config, run, world, model, context, counter, passes, [sample] * micro_batches)
        return _costs_of(
            engine,
            counter,
            passes,
            host=_offloaded(run, counter),
            tokens=micro_batches * sample.tokens_BS.numel(),
            load=load,
            in_flight=in_flight,
            travel_ranks=_travel_ranks(run.plan.layout, rank),
            exchanges_again=bool(recomputed_modules(config.model) & {"block", "moe_layer"}),
        )


def _stand_ins(on_cuda: bool) -> Iterator[AbstractContextManager[Any]]:
    """Yield what a step on fake tensors needs in place of values, ranks and a device, in order."""
    yield unknown_sizes_raise(UserError(UNKNOWN_SIZES))
    # In this thread, whose settings for fakes the threads of the autograd engine do not have.
    yield torch.autograd.set_multithreading_enabled(False)
    if on_cuda:
        yield from (fake_torch_cuda(), fused_operators())
    yield from (full_sequences(), zero_without_values(), modules_move_fakes(), objects_are_alike())
    yield fake_mode()


def _check_load(load: float, expert: int) -> None:
    if load == 1 or 1 < load <= expert:
        return
    if expert == 1:
        raise UserError(
            f"--load: found {load:g}, expected 1: parallel.expert is 1, all ranks hold all experts"
        )
    most = f"1 to {expert}, the ranks of parallel.expert"
    raise UserError(f"--load: found {load:g}, expected {most}: one of them cannot have more than all rows")


def _kept(config: RunConfig, shares: int) -> float | None:
    """Return `CostCounter.kept`; shares: the ranks that share a micro batch's tokens."""
    routers = [kind.moe.router for kind in kinds(config)]
    is_known = all(not router.masks and provides("dropless", router.capacity) for router in routers)
    return 1 / shares if shares > 1 and is_known else None


def _count_dispatches(config: RunConfig, run: ResolvedRun, model: Any, load: float, parts: Parts) -> None:
    """Let every MoE layer dispatch under a given load, see `CountedDispatch`."""
    of_layer = config_by_layer(config)
    for layer, moe in ((layer, of_layer[number].moe) for number, layer in model.moe_layers()):
        spread = mean_nodes(moe, run.plan.layout.nodes, mean_choices(moe))
        counted = CountedDispatch(layer.dispatcher, load, parts, spread)
        layer.dispatcher = layer.computation.dispatcher = counted


def _offloaded(run: ResolvedRun, counter: CostCounter) -> dict[str, int]:
    """Return bytes on the host by category; none without offload, when nothing of it is a state."""
    if run.plan.offload.optimizer == "none":
        return {}
    return {name: counter.host.live_bytes(name) for name in (PARAMETERS, GRADIENTS, OPTIMIZER)}


def _start_model(
    config: RunConfig, run: ResolvedRun, number: int, factory: MoEFactory, context: dist.ProcessGroup | None
) -> LanguageModel:
    """Return the model of a stage, or cut at ZeRO 3, as `megamoe.train.start_model` does."""
    vocab_size = run.vocabulary.size
    if config.parallel.pipeline > 1:
        stage = StageBlocks.of(config, number, vocab_size)
        each_part = partial(drop_other_blocks, stage)
        model = build_model(config, vocab_size, factory, run.kernels, each_part, context)
        assert isinstance(model, GPT)
        model.cut(stage)
        return model
    if run.plan.stage < 3:
        return build_model(config, vocab_size, factory, run.kernels, context=context)
    cut = Partition(run.filled, run.plan.precision)
    return build_model(config, vocab_size, factory, run.kernels, lambda prefix, module: cut(module), context)


@dataclass
class CountedPasses:
    """The counts of each pass of a step, and the bytes that its last forward pass kept."""

    counts: dict[Pass, Counts] = field(default_factory=dict)
    kept_bytes: int = 0


@contextmanager
def passes_counted(counter: CostCounter) -> Iterator["CountedPasses"]:
    """Inside, each pass of a step is also counted alone."""
    found = CountedPasses()

    def alone(run: Callable[..., None]) -> Callable[..., None]:
        def counted(self: Passes, each: Pass, *arguments: Any, **options: Any) -> None:
            step, counter.counts = counter.counts, Counts()
            before = counter.memory.live_bytes(ACTIVATIONS)
            run(self, each, *arguments, **options)
            found.counts[each] = counter.counts
            if each.forward:
                counter.memory.end_forward()
                found.kept_bytes = counter.memory.live_bytes(ACTIVATIONS) - before
            step.add(counter.counts)
            counter.counts = step

        return counted

    with replaced(Passes, forward=alone(Passes.forward), backward=alone(Passes.backward)):
        yield found


@cache
def fake_mode() -> FakeCudaMode:
    """One for all simulations of a process: caches of the program may keep fakes from one to the next."""
    return FakeCudaMode()


def _two_steps(
    config: RunConfig,
    run: ResolvedRun,
    world: launch.World,
    model: LanguageModel,
    context: StepContext,
    counter: CostCounter,
    passes: CountedPasses,
    batches: list[Batch],
) -> CountedEngine:
    """Train a step on one batch and then one on all, which is counted; return the engine."""
    for tensor in weights_of(model):
        counter.memory_of(tensor).add(tensor, PARAMETERS, "model")
    counter.phase = "start"
    engine = CountedEngine(config, model, world, run.plan, run.filled, run.kernels)
    engine.counter = counter
    engine.train(True)
    counter.phase = "step"
    counter.memory.begin_phase("step")
    batches = [without_values(batches[0])] * len(batches)
    for context.step in (1, 2):
        if context.step == 2:
            counter.counts = Counts()
            passes.counts.clear()
            counter.memory.start()
        given = batches if context.step == 2 else batches[:1]
        train_step(engine, context, given, config.optimizer.lr, config.train.label_smoothing)
        if engine.step_skipped:
            raise RuntimeError("the simulated step was skipped, so its update of the weights is not counted")
        engine.name_states()
    return engine


def _costs_of(engine: CountedEngine, counter: CostCounter, passes: CountedPasses, **of_run: Any) -> StepCosts:
    """Return the costs of what was counted; of_run: the fields that do not depend on it."""
    memory = counter.memory
    return StepCosts(
        counts=counter.counts,
        peaks=memory.peaks_by_phase(),
        passes=passes.counts,
        parameters=num_parameters(engine.model),
        parameter_bytes=memory.live_bytes(PARAMETERS),
        optimizer_bytes=memory.live_bytes(OPTIMIZER),
        gradient_bytes=engine.gradient_bytes,
        buffer_bytes=memory.live_bytes(GRADIENTS),
        kept_bytes=passes.kept_bytes,
        **of_run,
    )


def _travel_ranks(layout: Layout, rank: int) -> tuple[int, ...]:
    groups = layout.between_nodes_groups() if layout.nodes > 1 else layout.expert_groups()
    return next((tuple(group) for group in groups if rank in group), ())
