"""Checks between sections of the configuration and the number of ranks, before anything is allocated."""

from typing import Any

from megamoe.config.schema import DataConfig, Precision, RunConfig
from megamoe.config.shapes import (
    expert_ffn_size,
    inserted_after,
    inserted_has_norm,
    moe_layer_numbers,
    stacks,
)
from megamoe.errors import UserError
from megamoe.model.backends import check_backends
from megamoe.moe.suggestions import provides
from megamoe.moe.validation import check_parts
from megamoe.optim.schedule import check_warmup
from megamoe.parallel.zero.deepspeed_config import ParallelPlan
from megamoe.registry import get_part
from megamoe.validation.architecture import check_architecture, check_attention, check_positions, check_rotary
from megamoe.validation.layout import check_layout, row_unit
from megamoe.validation.objective import check_objective, refuse_routing_records
from megamoe.validation.pipeline import check_pipeline

MOST_SIZES = 100_000  # of the batch size's growth


def check_run(config: RunConfig, plan: ParallelPlan) -> None:
    """Refuse a configuration that cannot run.

    plan: what follows from the configuration on the available ranks.

    Raises:
        UserError: naming the keys, their values, what was expected and a way out.
    """
    check_architecture(config)
    check_attention(config.model)
    check_objective(config)
    _check_model(config)
    _check_experts(config, plan)
    _check_start(config)
    _check_batches(config, plan.layout.data)
    check_pipeline(config, plan)
    _check_schedule(config)
    _check_blend(config.data)
    check_backends(config, plan.precision)


def _check_model(config: RunConfig) -> None:
    model = config.model
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.head_size is None and model.latent is None:
        _divides("model.hidden_size", model.hidden_size, "model.num_attention_heads", heads)
    if groups is not None:
        _divides("model.num_attention_heads", heads, "model.num_query_groups", groups)
    check_rotary(model)


def _check_experts(config: RunConfig, plan: ParallelPlan) -> None:
    moe = config.moe
    check_positions(config)
    check_layout(config, plan.layout, plan.precision)
    if not moe_layer_numbers(config):
        refuse_routing_records(config, "the model has no MoE layer")
        return
    check_parts(moe, config.parallel.expert)
    _check_causal(config)
    _check_replay(config)
    _check_inserted(config)
    _check_rows(config, plan.precision)


def _check_causal(config: RunConfig) -> None:
    """Refuse a selector that chooses by later tokens where a decoder has MoE layers."""
    choice = config.moe.router.selector
    if not provides("sees_later_tokens", choice):
        return
    layers = [stack for stack in stacks(config) if stack.name == "decoder"]
    if any(stack.moe_blocks or stack.layers.insert_after for stack in layers):
        raise UserError(
            f"moe.router.selector: {choice.name}: in a decoder a token's experts would depend on later "
            "tokens, so that evaluation is not that of a language model; set allow_non_causal: true to "
            "accept that, or choose top_k"
        )


def _check_replay(config: RunConfig) -> None:
    router = config.moe.router
    selector: Any = get_part("selector", router.selector.name)
    if router.replay is not None and not selector.replays(router.selector.options):
        raise UserError(
            f"moe.router.replay: {router.replay}: weights of selector {router.selector.name} with "
            "these options do not follow from a token's experts alone; choose another moe.router.selector"
        )


def _check_inserted(config: RunConfig) -> None:
    """Check inserted and shared experts against each other."""
    moe = config.moe
    if moe.shared_expert_ffn_hidden_size is not None and moe.num_shared_experts == 0:
        raise UserError(
            f"moe.shared_expert_ffn_hidden_size: found {moe.shared_expert_ffn_hidden_size}, but "
            "moe.num_shared_experts is 0; set it to 1, or leave the size out"
        )
    if moe.shared_expert_mode != "sum" and moe.num_shared_experts == 0:
        raise UserError(
            f"moe.shared_expert_mode: found {moe.shared_expert_mode}, but moe.num_shared_experts is 0; "
            "set it to 1, or the mode to sum"
        )
    if inserted_after(config) and moe.num_shared_experts and not inserted_has_norm(moe):
        raise UserError(
            f"moe.num_shared_experts: found {moe.num_shared_experts}, but an inserted layer (moe.layers."
            f"insert_after) of {moe.expert_sublayers} sub-layers has norms inside its routed experts alone; "
            "set it to 0, or moe.expert_sublayers to 1"
        )


def _check_rows(config: RunConfig, precision: Precision) -> None:
    """Check that the experts' rows are aligned."""
    unit = row_unit(precision)
    sizes = {
        "model.hidden_size": config.model.hidden_size,
        "moe.expert_ffn_hidden_size (default: the dense blocks')": expert_ffn_size(config),
    }
    for key, size in sizes.items():
        if size % unit:
            raise UserError(
                f"{key}: {size} is not a multiple of {unit}, which grouped experts need in {precision}"
            )


def _check_start(config: RunConfig) -> None:
    """Check that frozen modules exist, and that a dense checkpoint's FFN can become the experts."""
    moe, experts = config.moe, config.checkpoint.init.experts
    dense = not moe_layer_numbers(config)
    if moe.frozen and dense:
        raise UserError(f"moe.frozen: found {', '.join(moe.frozen)}, but no block is MoE (moe.layers)")
    if experts == "same":
        return
    if config.checkpoint.init.path is None:
        raise UserError(
            f"checkpoint.init.experts: found {experts}, but checkpoint.init.path names no dense checkpoint"
        )
    if dense:
        raise UserError(
            f"checkpoint.init.experts: found {experts}, but no block is MoE (moe.layers); say same"
        )
    if inserted_after(config):
        raise UserError(
            f"checkpoint.init.experts: found {experts}, but moe.layers.insert_after puts MoE layers where a "
            "dense model has no FFN; use moe.layers.at or every"
        )
    if moe.expert_sublayers > 1:
        raise UserError(
            f"checkpoint.init.experts: found {experts}, but experts of {moe.expert_sublayers} sub-layers are "
            "no FFN; set moe.expert_sublayers=1"
        )


def _check_batches(config: RunConfig, data_parallel: int) -> None:
    train = config.train
    unit = train.micro_batch_size * data_parallel
    sizes = [("train.global_batch_size", train.global_batch_size or unit)]
    if train.batch_rampup is not None:
        sizes += [
            ("train.batch_rampup.start", train.batch_rampup.start),
            ("train.batch_rampup.increment", train.batch_rampup.increment),
        ]
    for key, size in sizes:
        if size % unit:
            raise UserError(
                f"{key}: {size} is not a multiple of {unit} (train.micro_batch_size "
                f"{train.micro_batch_size} x {data_parallel} data-parallel ranks); "
                f"nearest: {max(unit, (size + unit // 2) // unit * unit)}"
            )
    if train.batch_rampup is not None:
        growth = sizes[0][1] - train.batch_rampup.start
        if growth < 0 or growth % train.batch_rampup.increment:
            raise UserError(
                f"train.batch_rampup: from {train.batch_rampup.start} by {train.batch_rampup.increment} "
                f"does not reach train.global_batch_size {sizes[0][1]}"
            )
        if growth // train.batch_rampup.increment > MOST_SIZES:
            raise UserError(
                f"train.batch_rampup.increment: {train.batch_rampup.increment} makes more than "
                f"{MOST_SIZES:,} batch sizes of a growth by {growth}; raise it"
            )


def _check_schedule(config: RunConfig) -> None:
    optimizer = config.optimizer
    if config.train.steps is not None and config.train.epochs is not None:
        raise UserError(
            f"train.steps: found {config.train.steps} beside train.epochs {config.train.epochs:g}, and both "
            "say how long the run is; leave one out (on the command line: train.steps=null)"
        )
    if config.train.epochs is not None and config.data.mock:
        raise UserError("train.epochs: data.mock has no end, so no epochs; set train.steps instead")
    if optimizer.warmup_share is not None and optimizer.warmup_steps:
        raise UserError(
            f"optimizer.warmup_share: found {optimizer.warmup_share:g} beside optimizer.warmup_steps "
            f"{optimizer.warmup_steps}; leave one of them out"
        )
    if config.train.steps is not None:  # otherwise checked when the data is read
        check_warmup(config, config.train.steps)
    if optimizer.min_lr > optimizer.lr:
        raise UserError(f"optimizer.min_lr: {optimizer.min_lr} is more than optimizer.lr {optimizer.lr}")


def _check_blend(data: DataConfig) -> None:
    """Check that the sources' weights are given in one way only."""
    if data.sampling_exponent is None:
        return
    asked = f"data.sampling_exponent: found {data.sampling_exponent:g}"
    if data.mock:
        raise UserError(f"{asked}, but data.mock has no sources to weigh; leave it out")
    for place, source in enumerate(data.sources):
        if source.weight != 1:
            raise UserError(
                f"{asked}, from which the weights follow, but data.sources.{place} ({source.path}) has the "
                f"weight {source.weight:g}; leave the exponent or the weights out"
            )


def _divides(key: str, value: int, by_key: str, by: int) -> None:
    if value % by:
        raise UserError(f"{key}: {value} does not divide by {by_key} {by}")
