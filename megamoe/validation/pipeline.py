"""Checks of pipeline parallelism against the model, the batches and the DeepSpeed file."""

from megamoe.config.schema import RunConfig
from megamoe.errors import UserError
from megamoe.optim.schedule import BatchSchedule
from megamoe.parallel.pipeline.schedule import rounds_problem
from megamoe.parallel.zero.deepspeed_config import ParallelPlan
from megamoe.registry import get_part


def check_pipeline(config: RunConfig, plan: ParallelPlan) -> None:
    """Refuse a pipeline that the model, its batches or its ZeRO stage do not allow.

    Raises:
        UserError: naming the key, its value, what was expected and a way out.
    """
    parallel, stages = config.parallel, config.parallel.pipeline
    if stages == 1:
        for key, without in (("pipeline_chunks", 1), ("blocks_per_stage", None)):
            if (value := getattr(parallel, key)) != without:
                raise UserError(f"parallel.{key}: {value} needs parallel.pipeline above 1; leave it out")
        return
    _check_blocks(config)
    _check_model(config)
    _check_zero(config, plan)
    schedule = BatchSchedule.from_config(config.train, plan.layout.data)
    for size in {schedule.size_at(0), schedule.final}:
        problem = rounds_problem(stages, parallel.pipeline_chunks, size // schedule.unit)
        if problem is not None:
            raise UserError(f"parallel.pipeline_chunks: {parallel.pipeline_chunks}: {problem}")


def _check_blocks(config: RunConfig) -> None:
    parallel, blocks = config.parallel, config.model.num_layers
    parts = parallel.pipeline * parallel.pipeline_chunks
    if parts > blocks:
        raise UserError(
            f"parallel.pipeline: {parallel.pipeline} x pipeline_chunks {parallel.pipeline_chunks} are more "
            f"parts than model.num_layers {blocks}; at most one part for each block is possible"
        )
    counts = parallel.blocks_per_stage
    if counts is not None and (len(counts) != parts or sum(counts) != blocks):
        raise UserError(
            f"parallel.blocks_per_stage: {counts} has {len(counts)} numbers with the sum {sum(counts)}, "
            f"expected {parts} (pipeline x pipeline_chunks) with the sum {blocks} (model.num_layers); leave "
            "it out for a balanced split"
        )


def _check_model(config: RunConfig) -> None:
    stages, model = config.parallel.pipeline, config.model
    if model.architecture != "decoder":
        raise UserError(
            f"parallel.pipeline: {stages} needs model.architecture decoder, found {model.architecture}; set "
            "it to 1"
        )
    for name, loss in config.moe.losses.items():
        if get_part("loss", loss.name).needs_token_losses:
            raise UserError(
                f"moe.losses.{name}: needs the loss of each token in every stage, but parallel.pipeline "
                f"{stages} computes it in the last one; set parallel.pipeline to 1, or leave the loss out"
            )
    for key, value in (("log.routing", config.log.routing), ("moe.router.replay", config.moe.router.replay)):
        if value is not None:
            raise UserError(f"{key}: {value} is not possible with parallel.pipeline {stages}; set that to 1")


def _check_zero(config: RunConfig, plan: ParallelPlan) -> None:
    stages = config.parallel.pipeline
    where = config.parallel.deepspeed or "the DeepSpeed file"
    if plan.stage == 3:
        raise UserError(
            f"parallel.pipeline: {stages} is not possible with zero_optimization.stage 3 ({where}), which "
            "gathers weights over all ranks in one order; legal stages: 0, 1, 2"
        )
    if plan.offload.optimizer != "none" or plan.offload.parameters != "none":
        raise UserError(
            f"parallel.pipeline: {stages} is not possible with offloading ({where}); take it out of the file"
        )
    copies = config.model.tie_embeddings or config.model.multi_token_prediction.depth
    if plan.stage == 2 and copies:
        key = "model.tie_embeddings" if config.model.tie_embeddings else "model.multi_token_prediction.depth"
        raise UserError(
            f"parallel.pipeline: {stages} with {key} is not possible at zero_optimization.stage 2 ({where}), "
            "which cuts the gradient of the embedding before two stages have summed it; legal stages: 0, 1"
        )
