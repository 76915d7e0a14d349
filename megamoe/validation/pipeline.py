"""Checks of pipeline and context parallelism, and of two micro batches in flight, against the model, the
batches and the DeepSpeed file.
"""

from collections.abc import Iterator

from megamoe.config.schema import RunConfig
from megamoe.errors import Problem
from megamoe.optim.schedule import BatchSchedule
from megamoe.parallel.pipeline.schedule import rounds_problem
from megamoe.parallel.zero.deepspeed_config import ParallelPlan
from megamoe.registry import get_part
from megamoe.validation.layer_groups import of_each_kind

IN_FLIGHT = "train.in_flight"


def pipeline_problems(
    config: RunConfig, plan: ParallelPlan, schedule: BatchSchedule | None
) -> Iterator[Problem]:
    """Yield why the model, its batches or its ZeRO stage do not allow the stages or parts of sequences.

    schedule: of the batch size; None: it is wrong itself.
    """
    parallel = config.parallel
    for key in ("pipeline", "context"):
        if getattr(parallel, key) > 1:
            yield from _model_problems(config, key)
    yield from _context_problems(config)
    if parallel.pipeline == 1:
        for key, without in (("pipeline_chunks", 1), ("blocks_per_stage", None)):
            if (value := getattr(parallel, key)) != without:
                yield Problem(f"parallel.{key}", f"{value} needs parallel.pipeline above 1; leave it out")
        return
    yield from _block_problems(config)
    yield from _zero_problems(config, plan)
    for size in () if schedule is None else schedule.sizes():
        chunks, micro_batches = parallel.pipeline_chunks, size // schedule.unit  # type: ignore[union-attr]
        problem = rounds_problem(parallel.pipeline, chunks, micro_batches)
        if problem is not None:
            yield Problem("parallel.pipeline_chunks", f"{chunks}: {problem}")
            return  # one of a growing batch's sizes is enough


def in_flight_problems(
    config: RunConfig, plan: ParallelPlan, schedule: BatchSchedule | None
) -> Iterator[Problem]:
    """Yield why two micro batches cannot take turns.

    schedule: of the batch size; None: it is wrong itself.
    """
    if config.train.in_flight == 1:
        return
    where = config.parallel.deepspeed or "the DeepSpeed file"
    if config.parallel.pipeline > 1:
        yield Problem(
            IN_FLIGHT,
            f"2 is not possible with parallel.pipeline {config.parallel.pipeline}, whose stages order the "
            "passes of the micro batches; set one of the two to 1",
        )
    if plan.stage == 3:
        yield Problem(
            IN_FLIGHT,
            f"2 is not possible with zero_optimization.stage 3 ({where}), which gathers and frees the "
            "weights of one pass at a time; set it to 1, or take stage 0, 1 or 2",
        )
    if config.model.fp8 != "none":
        yield Problem(
            IN_FLIGHT,
            f"2 is not possible with model.fp8 {config.model.fp8}, whose scales are of one pass at a time; "
            "set it to 1, or model.fp8: none",
        )
    if schedule is not None and schedule.final < 2 * schedule.unit:
        yield Problem(
            IN_FLIGHT,
            f"2 needs two micro batches of each rank, but train.global_batch_size is {schedule.final}; set "
            f"it to {2 * schedule.unit} or more, or train.in_flight to 1",
        )


def _block_problems(config: RunConfig) -> Iterator[Problem]:
    parallel, blocks = config.parallel, config.model.num_layers
    parts = parallel.pipeline * parallel.pipeline_chunks
    if parts > blocks:
        yield Problem(
            "parallel.pipeline",
            f"{parallel.pipeline} x pipeline_chunks {parallel.pipeline_chunks} are more parts than "
            f"model.num_layers {blocks}; each part has at least one block",
        )
    counts = parallel.blocks_per_stage
    if counts is not None and (len(counts) != parts or sum(counts) != blocks):
        yield Problem(
            "parallel.blocks_per_stage",
            f"{counts} has {len(counts)} numbers with the sum {sum(counts)}, expected {parts} (pipeline x "
            f"pipeline_chunks) with the sum {blocks} (model.num_layers); leave it out for a balanced split",
        )


def _model_problems(config: RunConfig, key: str) -> Iterator[Problem]:
    size, model = getattr(config.parallel, key), config.model
    if model.architecture != "decoder":
        found = f"found {model.architecture}; set it to 1"
        yield Problem(f"parallel.{key}", f"{size} needs model.architecture decoder, {found}")
    yield from of_each_kind(config, lambda own: _loss_problems(own, key))


def _loss_problems(config: RunConfig, key: str) -> Iterator[Problem]:
    size = getattr(config.parallel, key)
    for name, loss in config.moe.losses.items():
        if get_part("loss", loss.name).needs_token_losses:
            yield Problem(
                f"moe.losses.{name}",
                f"needs the loss of each token on every rank, which parallel.{key} {size} does not give; set "
                f"parallel.{key} to 1, or leave the loss out",
            )


def _context_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what the exchange of heads for positions cannot divide."""
    parallel, model = config.parallel, config.model
    if parallel.context == 1:
        return
    ranks = parallel.tensor * parallel.context
    of_both = f"parallel.context {parallel.context} x tensor {parallel.tensor} = {ranks}"
    for name, size in (
        ("model.num_attention_heads", model.num_attention_heads),
        ("data.sequence_length", config.data.sequence_length),
    ):
        if size % ranks:
            legal = [n for n in range(1, size + 1) if size % (n * parallel.tensor) == 0][:8]
            yield Problem(
                "parallel.context",
                f"{of_both} does not divide {name} {size}; legal with tensor {parallel.tensor}: "
                f"{', '.join(map(str, legal)) or 'none'}",
            )


def _zero_problems(config: RunConfig, plan: ParallelPlan) -> Iterator[Problem]:
    stages, where = config.parallel.pipeline, config.parallel.deepspeed or "the DeepSpeed file"
    if plan.stage == 3:
        yield Problem(
            "parallel.pipeline",
            f"{stages} is not possible with zero_optimization.stage 3 ({where}), which gathers weights over "
            "all ranks in one order; legal stages: 0, 1, 2",
        )
    if plan.offload.optimizer != "none" or plan.offload.parameters != "none":
        yield Problem("parallel.pipeline", f"{stages} is not possible with offloading ({where})")
    tied = config.model.tie_embeddings
    if plan.stage == 2 and (tied or config.model.multi_token_prediction.depth):
        key = "model.tie_embeddings" if tied else "model.multi_token_prediction.depth"
        yield Problem(
            "parallel.pipeline",
            f"{stages} with {key} is not possible at zero_optimization.stage 2 ({where}), which cuts the "
            "gradient of the embedding before two stages have summed it; legal stages: 0, 1",
        )
