"""Checks whether a layout is legal, and explains why not."""

from collections.abc import Iterator
from itertools import product

from megamoe.config import shapes
from megamoe.config.layer_kinds import kinds
from megamoe.config.schema import Precision, RunConfig
from megamoe.errors import Problem
from megamoe.moe.capabilities import capabilities
from megamoe.parallel.layout import Layout, divisors, fewest_ranks
from megamoe.validation.exchange import exchange_problems
from megamoe.validation.layer_groups import named

GROUPED_ROW_BYTES = 16  # PyTorch's grouped GEMM needs rows of a multiple of this
KEYS = ("tensor", "expert", "expert_tensor", "pipeline", "context")


def layout_problems(config: RunConfig, layout: Layout, precision: Precision | None) -> Iterator[Problem]:
    """Yield why a layout does not fit the ranks or the model, with the legal values."""
    parallel = config.parallel
    if parallel.sequence and parallel.tensor == 1:
        yield Problem("parallel.sequence", "true needs parallel.tensor above 1; set it to false")
    fewest = fewest_ranks(parallel)
    more = f"; or start more ranks: torchrun --nproc-per-node {fewest} pretrain_gpt_moe.py ..."
    for key, reason in misfits(config, layout, precision):
        legal = _legal(config, layout, precision, key) + more * (layout.ranks < fewest)
        yield Problem(f"parallel.{key}", f"{getattr(parallel, key)} {reason}; {legal}")
    yield from exchange_problems(config, layout)


def misfits(config: RunConfig, layout: Layout, precision: Precision | None) -> Iterator[tuple[str, str]]:
    """Yield (key of `parallel`, what is wrong with its value)."""
    for key, unit, by_key, size in _divisions(config, layout):
        if size % unit:
            yield key, f"does not divide {by_key} {size}"
    if not shapes.moe_layer_numbers(config):
        for key in ("expert", "expert_tensor"):
            if getattr(layout, key) > 1:
                yield key, "has nothing to divide: no block is MoE (moe.layers)"
        return
    for kind in kinds(config):
        for key, reason in _layer_misfits(kind.config, layout, precision):
            yield key, named(kind, reason)


def _layer_misfits(
    config: RunConfig, layout: Layout, precision: Precision | None
) -> Iterator[tuple[str, str]]:
    """Yield why the layout does not go with one kind of MoE layers."""
    for part in (config.moe.router.scorer, config.moe.router.residual):
        for key in ("tensor", "context"):
            if getattr(layout, key) > 1 and "over_tokens" in capabilities(part):
                named_part = f"{part.kind} {part.name}"
                yield key, f"gives a rank a part of each sequence, and the {named_part} reads other tokens"
    if layout.expert_tensor > 1 and config.moe.expert_sublayers > 1:
        yield (
            "expert_tensor",
            f"cannot cut experts of {config.moe.expert_sublayers} sub-layers, with norms inside",
        )
    hidden_size = shapes.expert_hidden_size(config)
    if config.moe.expert_bias and hidden_size % layout.expert_tensor:
        yield "expert_tensor", f"cannot cut the experts' biases of size {hidden_size} (moe.expert_bias)"
    unit = row_unit(precision)
    if layout.expert_tensor > 1 and shapes.expert_ffn_size(config) // layout.expert_tensor % unit:
        size = shapes.expert_ffn_size(config)
        needs = f"which are no multiple of {unit}, as grouped experts need in {precision}"
        yield "expert_tensor", f"cuts experts of FFN size {size} into slices, {needs}"


def row_unit(precision: Precision | None) -> int:
    """Return the number that the sizes of grouped products must be a multiple of; 1 if none is known."""
    if precision is None:
        return 1
    return GROUPED_ROW_BYTES // (4 if precision == "fp32" else 2)


def _divisions(config: RunConfig, layout: Layout) -> Iterator[tuple[str, int, str, int]]:
    """Return (key, its value, the name of the size that it must divide, that size)."""
    model, tensor = config.model, layout.tensor
    yield "pipeline", layout.pipeline, "the number of ranks", layout.ranks
    ranks, of_stage = layout.stage_ranks, "" if layout.pipeline == 1 else " of a pipeline stage"
    name = f"the number of ranks{of_stage}"
    yield "tensor", tensor, name, ranks
    times = f" (with parallel.tensor {tensor})" if tensor > 1 else ""
    if layout.context > 1:
        yield "context", layout.batch_ranks, f"{name}{times}", ranks
    yield "tensor", tensor, "model.num_attention_heads", model.num_attention_heads
    if model.num_query_groups is not None:
        yield "tensor", tensor, "model.num_query_groups", model.num_query_groups
    if model.latent is not None:
        compressed = model.latent.key_value_rank + model.latent.rope_size
        yield "tensor", tensor, "model.latent.key_value_rank + rope_size", compressed
        if model.latent.query_rank is not None:
            yield "tensor", tensor, "model.latent.query_rank", model.latent.query_rank
    if len(shapes.moe_block_numbers(config)) < shapes.num_blocks(config):
        yield "tensor", tensor, "the dense blocks' FFN size", shapes.ffn_size(model)
    yield "tensor", tensor, "model.vocab_multiple", model.vocab_multiple
    yield "tensor", tensor, "data.sequence_length", config.data.sequence_length
    yield "expert", layout.expert, name, ranks
    for kind in kinds(config):
        size = shapes.expert_ffn_size(kind.config)
        yield "expert", layout.expert, kind.place("moe.num_experts"), kind.moe.num_experts
        yield "expert_tensor", layout.expert_tensor, kind.place("moe.expert_ffn_hidden_size"), size
    if layout.expert_tensor > 1:  # else it is said of `expert`
        times = f" (with parallel.expert {layout.expert})" if layout.expert > 1 else ""
        yield "expert_tensor", layout.expert_ranks, f"{name}{times}", ranks


def _legal(config: RunConfig, chosen: Layout, precision: Precision | None, key: str) -> str:
    """Return the legal values of the key; if there are none, all legal layouts."""
    ranks = chosen.ranks
    sizes = {name: [getattr(chosen, name)] for name in KEYS}
    legal = _legal_among(config, precision, ranks, {**sizes, key: divisors(ranks)})
    shown = [name for name in KEYS if name in KEYS[:3] or getattr(chosen, name) > 1]
    others = ", ".join(f"{name} {getattr(chosen, name)}" for name in shown if name != key)
    if legal:
        return f"legal on {ranks} ranks with {others}: {', '.join(str(getattr(it, key)) for it in legal)}"
    legal = _legal_among(config, precision, ranks, {**sizes, **dict.fromkeys(KEYS[:3], divisors(ranks))})
    found = ", ".join(f"{it.tensor} x {it.expert} x {it.expert_tensor}" for it in legal)
    return f"legal tensor x expert x expert_tensor on {ranks} ranks: {found or 'none'}"


def _legal_among(
    config: RunConfig, precision: Precision | None, ranks: int, sizes: dict[str, list[int]]
) -> list[Layout]:
    layouts = [Layout(ranks, *choice) for choice in product(*(sizes[key] for key in KEYS))]
    return [layout for layout in layouts if next(misfits(config, layout, precision), None) is None]
