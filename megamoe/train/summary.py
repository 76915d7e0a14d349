"""A summary of the run before it begins."""

from typing import Any

from megamoe.config import RunConfig, shapes
from megamoe.config.layer_kinds import kinds
from megamoe.config.mup import Scaling
from megamoe.config.schema import GroupConfig, ModelConfig, MoEConfig, OptimizerConfig
from megamoe.data.vocabulary import Vocabulary
from megamoe.model.backends import backend_rows
from megamoe.model.size import ModelSize, model_size
from megamoe.model.stage import block_ranges, stage_sizes
from megamoe.moe.router import mean_choices
from megamoe.optim.parameter_groups import weight_decay
from megamoe.optim.schedule import warmup_steps
from megamoe.parallel.launch import World
from megamoe.parallel.layout import Layout
from megamoe.registry import get_part, is_ours
from megamoe.train.resolved import ResolvedRun
from megamoe.validation.memory import in_bytes, states_of

MOST_IDLE = 0.25  # of a pipeline, without a hint
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "muon": "Muon, AdamW beside it"}
Rows = dict[str, list[tuple[str, object]]]


def summary_record(run: ResolvedRun) -> dict[str, Any]:
    """Return the plain figures for summary.json."""
    size, layout = model_size(run.config, run.vocabulary.size), run.plan.layout
    return {
        "steps": run.steps,
        "parameters_total": size.total,
        "parameters_active": size.active,
        "parameters_routed_experts": size.expert,
        "vocabulary": run.vocabulary.size,
        "ranks": layout.ranks,
        "pipeline_parallel": layout.pipeline,
        "context_parallel": layout.context,
        "tensor_parallel": layout.tensor,
        "expert_parallel": layout.expert,
        "expert_tensor_parallel": layout.expert_tensor,
        "zero_stage": run.plan.stage,
        "precision": run.plan.precision,
    }


def summary_rows(run: ResolvedRun, world: World, first_step: int, samples: int) -> Rows:
    """Return the rows of the start-up table.

    first_step: the last completed step; samples: those of the completed steps.
    """
    config = run.config
    size = model_size(config, run.vocabulary.size)
    return {
        "run": _run_rows(run, first_step, samples),
        "model": _model_rows(config, run.vocabulary, size),
        "ranks": _rank_rows(run, world),
        "backends": list(backend_rows(config, run.kernels, run.plan.precision).items()),
    }


def _run_rows(run: ResolvedRun, first_step: int, done: int) -> list[tuple[str, object]]:
    config, schedule, steps = run.config, run.schedule, run.steps
    to_come = schedule.total_samples(max(0, steps - first_step), done) - done
    length = f"{steps:,}" if config.train.epochs is None else f"{steps:,} ({config.train.epochs:g} epochs)"
    batch = f"{schedule.final} sequences of {run.sample_tokens} tokens"
    if schedule.start < schedule.final:
        batch += f", growing from {schedule.start} over the first {schedule.ramp_samples:,} samples"
    begin = "from the start" if first_step == 0 else f"resumed after step {first_step:,}"
    return [
        ("name", config.name),
        ("steps", f"{length}, {begin}"),
        ("batch", batch),
        ("data", run.data_source),
        ("tokens to come", f"{to_come * run.sample_tokens:,}"),
        ("optimiser", _optimizer(config.optimizer, steps)),
        *([] if config.model.mup is None else [("muP", _mup(config.model))]),
        *[("parameters by name", _group(group)) for group in config.optimizer.groups],
    ]


def _optimizer(config: OptimizerConfig, steps: int) -> str:
    decay = "L2 regularisation" if config.name == "adam" else "weight decay"
    line = f"{OPTIMIZERS[config.name]}, lr {config.lr:g}, {config.schedule}"
    if warmup_steps(config, steps):
        line += f" after {warmup_steps(config, steps):,} steps of warm-up"
    return f"{line}, {decay} {weight_decay(config):g}" if weight_decay(config) else line


def _mup(model: ModelConfig) -> str:
    scaling = Scaling.of(model)
    line = f"{scaling.width:g} times as wide as the base; hidden weights learn at lr / {scaling.width:g}"
    return line if scaling.depth == 1 else f"{line}; what blocks add is multiplied by {scaling.depth:g}"


def _group(group: GroupConfig) -> str:
    decay = "" if group.weight_decay is None else f", weight decay {group.weight_decay:g}"
    algorithm = "" if group.algorithm is None else f", {OPTIMIZERS[group.algorithm].partition(',')[0]}"
    return f"{group.pattern}: {group.lr_scale:g} x lr{decay}{algorithm}"


def _model_rows(config: RunConfig, vocabulary: Vocabulary, size: ModelSize) -> list[tuple[str, object]]:
    model = config.model
    heads = f"{model.num_attention_heads} heads"
    rows: list[tuple[str, object]] = [
        ("parameters", f"{size.total:,} total, {size.active:,} active per token"),
        ("blocks", f"{_blocks(config)} of hidden size {model.hidden_size}, {heads}"),
        ("vocabulary", f"{vocabulary.size:,}"),
        ("activation", _activations(config)),
    ]
    if not shapes.moe_layer_numbers(config):
        return [*rows, ("FFN", f"dense, size {shapes.ffn_size(model)}")]
    places = [str(number) for number in shapes.moe_block_numbers(config)]
    places += [f"after {number}" for number in shapes.inserted_after(config)]
    rows.append(("MoE blocks", ", ".join(places)))
    for kind in sorted(kinds(config), key=lambda each: each.layers):
        rows += _kind_rows(kind.config, f" of {kind.name}" if config.moe.groups else "")
    return rows


def _kind_rows(config: RunConfig, of: str) -> list[tuple[str, object]]:
    """Return the rows of one kind of MoE layers; of: their blocks, where there are several kinds."""
    moe, router = config.moe, config.moe.router
    experts = f"{moe.num_experts} of FFN size {shapes.expert_ffn_size(config)}"
    zero = moe.zero_experts
    if zero.total:
        kinds_of = {"identity": zero.identity, "zero": zero.zero, "constant": zero.constant}
        named_kinds = ", ".join(f"{count} {name}" for name, count in kinds_of.items() if count)
        experts += (
            f", {zero.total} without computation ({named_kinds}), {mean_choices(moe):g} per token compute"
        )
    if moe.latent_size is not None:
        experts += f" on latent rows of {moe.latent_size}"
    if moe.expert_sublayers > 1:
        experts += f", each a stack of {moe.expert_sublayers}"
    if moe.num_shared_experts:
        experts += f", {moe.num_shared_experts} shared"
        if moe.shared_expert_ffn_hidden_size is not None:
            experts += f" of joint size {moe.shared_expert_ffn_hidden_size}"
    stages = [router.scorer, router.residual, *router.masks]
    stages += [router.score_function, router.selector, router.capacity]
    return [
        (f"experts{of}", experts),
        (f"router{of}", " -> ".join(stage.name for stage in stages if stage.name != "none")),
        (f"losses{of}" if of else "auxiliary losses", _losses(moe)),
    ]


def _losses(moe: MoEConfig) -> str:
    return ", ".join(f"{name} {choice.options.weight:g}" for name, choice in moe.losses.items()) or "none"


def _blocks(config: RunConfig) -> str:
    """Return the number of blocks; of any model but a decoder, with what they are."""
    found = " + ".join(f"{stack.num_layers} {stack.name}" for stack in shapes.stacks(config))
    if config.model.num_labels is not None:
        found += f" with a head for {config.model.num_labels} labels,"
    if config.model.architecture != "decoder":
        return found
    depth = config.model.multi_token_prediction.depth
    return f"{config.model.num_layers}{f' + {depth} of multi-token prediction' if depth else ''}"


def _activations(config: RunConfig) -> str:
    dense = config.model.activation
    found = dict.fromkeys(shapes.expert_activation(kind.config) for kind in kinds(config) if kind.layers)
    return dense if not {*found} - {dense} else f"{dense}, of experts {', '.join(found)}"


def _rank_rows(run: ResolvedRun, world: World) -> list[tuple[str, object]]:
    config, plan = run.config, run.plan
    largest = max(stage_sizes(config, run.vocabulary.size), key=lambda each: each.total)
    states = states_of(config, plan, largest)
    parts = [("weights", states.weights), ("gradients", states.gradients), ("optimiser", states.optimizer)]
    shown = ", ".join(f"{name} {in_bytes(held)}" for name, held in parts if held)
    offloaded = {"on the CPU": states.cpu, "on disk": states.nvme}
    elsewhere = "".join(f", {in_bytes(held)} more {place}" for place, held in offloaded.items() if held)
    of_states = f"{in_bytes(states.total)} of model states ({shown})"
    return [
        ("world", _world(plan.layout, config.parallel.sequence)),
        ("device", f"{world.device.type}, {world.backend}, {plan.precision}, ZeRO {plan.stage}"),
        *_order_rows(config, world),
        *_exchange_rows(config, plan.layout),
        *_stage_rows(config, run.vocabulary.size, run.schedule.accumulation_at(0)),
        ("memory per rank", f"{of_states}{elsewhere}, and the activations"),
    ]


def _order_rows(config: RunConfig, world: World) -> list[tuple[str, object]]:
    """Return the row that says what train.deterministic costs."""
    costs = {"cpu": "nothing on a CPU"}.get(world.device.type, "time in sums by index and attention")
    return [("order of additions", f"fixed, which costs {costs}")] if config.train.deterministic else []


def _exchange_rows(config: RunConfig, layout: Layout) -> list[tuple[str, object]]:
    """Return the row about the exchange between expert-parallel ranks, where it has something to say."""
    parallel = config.parallel
    said = []
    if layout.nodes > 1:
        said.append(f"by node, {layout.nodes} nodes with {layout.expert // layout.nodes} expert ranks each")
    elif not is_ours(get_part("exchange", parallel.exchange.name)):
        said.append(parallel.exchange.name)
    if parallel.exchange_dtype == "fp8":
        said.append("rows to the experts in 8 bits")
    return [("exchange", ", ".join(said))] if said and layout.expert_ranks > 1 else []


def _stage_rows(config: RunConfig, vocab_size: int, micro_batches: int) -> list[tuple[str, object]]:
    """Return the row about pipeline stages: their blocks, and the share of time in which they wait."""
    stages, chunks = config.parallel.pipeline, config.parallel.pipeline_chunks
    if stages == 1:
        return []
    counts = "+".join(str(len(blocks)) for blocks in block_ranges(config, vocab_size))
    order = f"interleaved 1F1B, {chunks} chunks" if chunks > 1 else "1F1B"
    idle = (stages - 1) / (chunks * micro_batches + stages - 1)
    few = f"; more than {micro_batches} micro batches a step would lower it" if idle > MOST_IDLE else ""
    return [("stages", f"{counts} blocks, {order}, idle {idle:.0%} of the time if all stages are equal{few}")]


def _world(layout: Layout, sequence: bool) -> str:
    sizes = {"pipeline": layout.pipeline, "data": layout.data, "context": layout.context}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "data"]
    if layout.tensor > 1:
        parts.append(f"tensor {layout.tensor}{', sequence parallel' if sequence else ''}")
    parts.append(f"expert {layout.expert}")
    if layout.expert_tensor > 1:
        parts.append(f"expert tensor {layout.expert_tensor}")
    return f"{layout.ranks} ({', '.join(parts)})"
