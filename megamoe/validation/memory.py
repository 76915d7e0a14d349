"""Estimates a rank's memory from the configuration, and compares it with the available memory before the
start.
"""

import math
from collections.abc import Iterator

import torch

from megamoe.config import RunConfig
from megamoe.config.shapes import moe_layer_numbers, padded_vocab_size, stacks
from megamoe.errors import Problem, UserError
from megamoe.host_memory import available_bytes
from megamoe.model.size import ModelSize
from megamoe.model.stage import least_stage
from megamoe.objectives.objective import objective_class
from megamoe.parallel.launch import World, ranks_of_machine
from megamoe.parallel.zero.costs import Share, StateBytes, state_bytes
from megamoe.parallel.zero.deepspeed_config import ParallelPlan, bucket_elements

BYTES_OF_A_TOKEN = 3 * 8 + 4  # in a batch: id, label, position; loss mask
BYTES_OF_A_START = 4  # with data.document_aware: where its document begins
ACTIVATIONS, BATCHES, BUILT = "activations", "a step's batch", "weights in fp32 while the model is built"
BUCKET = "the gradients' bucket"
SHORTER = "lower train.micro_batch_size, train.global_batch_size or data.sequence_length"
SMALLER = "make the model smaller (model.*, moe.*), cut it into more parts (parallel.tensor, parallel.expert)"
OF_STATES = f"{SMALLER}, or take a higher ZeRO stage or offload (parallel.deepspeed)"
WAYS_OUT = {
    ACTIVATIONS: SHORTER,
    BATCHES: SHORTER,
    BUILT: f"{SMALLER}, or start fewer ranks on a machine",
    BUCKET: "lower zero_optimization.reduce_bucket_size of the DeepSpeed file",
}
UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def states_of(config: RunConfig, plan: ParallelPlan, size: ModelSize) -> StateBytes:
    """Return the bytes of model states on one rank."""
    ranks = plan.layout
    dense, experts = size.on_rank(ranks.tensor, ranks.expert_ranks)
    share = 1 - size.frozen / size.expert if size.frozen else 1.0
    trained = share * experts if size.frozen else experts
    is_muon = config.optimizer.name == "muon"
    matrices = size.matrices_on_rank(ranks.tensor, ranks.expert_ranks) if is_muon else (0.0, 0.0)
    shares = (
        share_of(config, dense, dense, ranks.replicas, matrices[0]),
        share_of(config, experts, trained, ranks.expert_copies, share * matrices[1]),
    )
    accumulates = (config.train.global_batch_size or 0) > config.train.micro_batch_size * ranks.data
    aside = size.moe_dense if ranks.tensor > 1 and accumulates else 0
    return state_bytes(shares, plan.stage, plan.precision, plan.offload, aside)


def share_of(
    config: RunConfig, parameters: float, trained: float, replicas: int, of_muon: float = 0
) -> Share:
    """Return the share with what the optimiser keeps of a trained parameter."""
    optimizer = config.optimizer
    moment = 2 if optimizer.moments == "bf16" else 4
    return Share(parameters, trained, replicas, of_muon, optimizer.ema is not None, moment)


def memory_problems(
    config: RunConfig, plan: ParallelPlan, world: World, vocabulary_size: int
) -> Iterator[Problem]:
    """Yield why a model or a batch cannot fit, by comparing the least memory needed with all memory.

    On CUDA this is the device's whole memory. On the host it is the memory available now, divided among the
    machine's ranks.
    """
    try:
        size = least_stage(config, vocabulary_size)
    except UserError:  # a part cannot be built; building the model gives a better message
        return
    states = states_of(config, plan, size)
    on_device = {
        "weights": states.weights,
        "gradients": states.gradients,
        "optimiser states": states.optimizer,
        ACTIVATIONS: _least_activations(config, plan, vocabulary_size),
    }
    on_host = {"offloaded states": states.cpu, BATCHES: _batch_bytes(config, plan)}
    built = {BUILT: 4 * _built_at_once(config, plan, size)}
    bucket = {BUCKET: 4 * bucket_elements(plan)}
    ranks, available = ranks_of_machine() or 1, available_bytes()
    host = math.inf if available is None else available / ranks
    each = f" for each of its {ranks} ranks" if ranks > 1 else ""
    of_host = f"this machine has {in_bytes(host)} available{each}"
    if world.device.type == "cuda":
        device = torch.cuda.get_device_properties(world.device).total_memory
        of_device = f"{world.device} has {in_bytes(device)}"
        limits = [(on_device, device, of_device), (bucket, device, of_device), (on_host, host, of_host)]
    else:
        limits = [({**on_device, **on_host}, host, of_host), (bucket, host, of_host)]
    for parts, limit, place in [*limits, (built, host, of_host)]:
        if sum(parts.values()) > limit:
            yield Problem("memory", _shortage(parts, place))
            return  # one way out at a time: it changes the other needs too


def _built_at_once(config: RunConfig, plan: ParallelPlan, size: ModelSize) -> float:
    """Return the parameters that a rank has in fp32 at a time while the model is built, or fewer.

    At ZeRO 3 the model is cut block by block, and one block's experts are counted.
    """
    dense, experts = size.on_rank(plan.layout.tensor, plan.layout.expert_ranks)
    if plan.stage < 3:
        return dense + experts
    return experts / max(1, len(moe_layer_numbers(config)))


def _shortage(parts: dict[str, float], place: str) -> str:
    total = sum(parts.values())
    shown = ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items() if size > total / 1000)
    largest = max(parts, key=parts.__getitem__)
    way_out = WAYS_OUT.get(largest, OF_STATES)
    return f"a rank needs at least {in_bytes(total)} ({shown}), but {place}; {way_out}"


def _least_activations(config: RunConfig, plan: ParallelPlan, vocabulary_size: int) -> float:
    """Return the bytes that every implementation needs: the inputs of the blocks, and the logits of the
    places that the objective predicts, of the micro batches in flight.
    """
    model, ranks = config.model, plan.layout.tensor
    tokens: float = config.train.micro_batch_size * config.data.sequence_length
    width = 4 if plan.precision == "fp32" else 2
    shares = objective_class(config).shares(config.train.objective.options, config)
    of_stack = {"encoder": shares.encoder, "decoder": shares.decoder}
    blocks = sum(of_stack.get(stack.name, 1.0) * stack.num_layers for stack in stacks(config))
    blocks /= config.parallel.pipeline
    tokens /= config.parallel.context
    inputs = blocks * model.hidden_size / (ranks if config.parallel.sequence else 1)
    logit_width = shares.predicted * padded_vocab_size(vocabulary_size, model.vocab_multiple) / ranks
    logits = logit_width if model.num_labels is None and config.parallel.pipeline == 1 else 0.0
    return float(config.train.in_flight * tokens * width * (inputs + logits))


def _batch_bytes(config: RunConfig, plan: ParallelPlan) -> float:
    """Return the bytes of a rank's part of a step's batch, which is read before the step."""
    samples = config.train.global_batch_size or config.train.micro_batch_size * plan.layout.data
    width = BYTES_OF_A_TOKEN + (BYTES_OF_A_START if config.data.document_aware else 0)
    return float(width * config.data.sequence_length * samples / plan.layout.data)


def in_bytes(size: float) -> str:
    """Format a size: `12 KiB`, `340 MiB`, `1.5 GiB`."""
    unit, value = 0, size / 1024
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    if value >= 1024:
        return f"{value:.3g} {UNITS[unit]}"
    return f"{value:.{1 if unit > 1 else 0}f} {UNITS[unit]}"
