"""A pipeline stage: a decoder without the parts of the other stages. Names stay those of the whole model."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from torch import Tensor, nn

from megamoe.config.layer_kinds import config_by_layer, group_layers, scores_before
from megamoe.config.schema import GroupLayersConfig, LayersConfig, RunConfig
from megamoe.config.shapes import routed_experts, stacks
from megamoe.model.moe_block import Block
from megamoe.model.size import (
    ModelSize,
    block_flops,
    final_norms,
    model_size,
    position_size,
    token_embeddings,
)

OF_A_BLOCK = re.compile(r"model\.decoder\.layers\.(\d+)\.$")


class OtherStage(nn.Module):
    """Stands where a block of another stage would be; hands the hidden states on.

    layer_number: the block's, from 1; Megatron-Core asks each block for it in FP8.
    """

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(self, hidden_states: Tensor, context: Any = None, **unused: Any) -> tuple[Tensor, Any]:
        """Return the hidden states and the context as they are."""
        return hidden_states, context


@dataclass(frozen=True)
class StageBlocks:
    """The blocks of one stage.

    stage, stages: this one, and their number. chunks: the indices of the decoder's blocks in each of the
    stage's chunks; chunk c of stage s is part c * stages + s of the model. scores: of each layer whose router
    or losses read the scores of a layer before: that layer's number, its own, and the number of experts.
    """

    stage: int
    stages: int
    chunks: tuple[range, ...]
    scores: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, config: RunConfig, stage: int, vocab_size: int) -> "StageBlocks":
        """Return the blocks of a stage; vocab_size: before padding."""
        stages, parts = config.parallel.pipeline, block_ranges(config, vocab_size)
        of_layer = config_by_layer(config)
        before = sorted(scores_before(config).items())
        scores = ((source, layer, routed_experts(of_layer[layer].moe)) for layer, source in before)
        return cls(stage, stages, tuple(parts[stage::stages]), tuple(scores))

    def scores_in(self, chunk: int) -> dict[int, int]:
        """Return the layers of parts before whose scores this chunk or a later part reads, with the number of
        their experts.
        """
        return self._scores_across(self.chunks[chunk].start)

    def scores_out(self, chunk: int) -> dict[int, int]:
        """Return what the next part's `scores_in` is."""
        return self._scores_across(self.chunks[chunk].stop)

    def _scores_across(self, blocks: int) -> dict[int, int]:
        """Return those that are handed on behind so many blocks of the decoder."""
        return {source: experts for source, layer, experts in sorted(self.scores) if source <= blocks < layer}

    def has(self, block: int) -> bool:
        """Return whether the stage has a block of the decoder, counted from 0."""
        return any(block in blocks for blocks in self.chunks)

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the output layer and multi-token prediction."""
        return self.stage == self.stages - 1

    def begins(self, chunk: int) -> bool:
        """Return whether a chunk is the model's first part."""
        return self.is_first and chunk == 0

    def ends(self, chunk: int) -> bool:
        """Return whether a chunk is the model's last part."""
        return self.is_last and chunk == len(self.chunks) - 1


WHOLE = StageBlocks(0, 1, (range(sys.maxsize),))  # of a model that is not cut


def block_ranges(config: RunConfig, vocab_size: int) -> list[range]:
    """Return the decoder's blocks of each part of the model, as `parallel.blocks_per_stage` says.

    By default the split is `balanced` by FLOPs. The output layer and multi-token prediction are work of the
    last part.
    """
    parallel = config.parallel
    counts = parallel.blocks_per_stage
    if counts is None:
        counts = blocks_of_parts(
            *block_flops(config, vocab_size), parallel.pipeline, parallel.pipeline_chunks
        )
    ends = list(accumulate(counts, initial=0))
    return [range(start, end) for start, end in pairwise(ends)]


def blocks_of_parts(work: list[float], after: float, stages: int, chunks: int) -> list[int]:
    """Return how many blocks each part of the model gets; part c * stages + s is chunk c of stage s.

    work, after: see `balanced`, which splits the blocks over the stages. The chunks of a stage share its
    blocks evenly; the last chunk of the last stage, which does more besides, has no more than the others.
    """
    of_stages = balanced(work, after, stages, least=chunks)
    return [count // chunks + (chunk < count % chunks) for chunk in range(chunks) for count in of_stages]


def stage_sizes(config: RunConfig, vocab_size: int) -> list[ModelSize]:
    """Return the parameters of each stage, without final norms where a stage has none; `vocab_size` before
    padding.
    """
    stages, model = config.parallel.pipeline, config.model
    if stages == 1:
        return [model_size(config, vocab_size)]
    (embedding, number), positions = token_embeddings(config, vocab_size), position_size(config)
    parts = block_ranges(config, vocab_size)
    sizes = []
    for stage in range(stages):
        blocks = [block for part in parts[stage::stages] for block in part]
        is_last, depth = stage == stages - 1, model.multi_token_prediction.depth
        tables = 1 if stage == 0 else 0  # of words
        if is_last:
            tables = number if depth else 1
        has_positions = stage == 0 or (is_last and depth > 0)
        of_stage = _with_blocks(config, blocks, is_last)
        size = model_size(of_stage, vocab_size)
        sharded = embedding * (number - tables)
        less = sharded + (0 if has_positions else positions) + (0 if is_last else final_norms(of_stage))
        sizes.append(
            replace(
                size,
                total=size.total - less,
                active=size.active - less,
                tensor_sharded=size.tensor_sharded - sharded,
            )
        )
    return sizes


def least_stage(config: RunConfig, vocab_size: int) -> ModelSize:
    """Return the size of the stage with the fewest parameters; without stages, of the model."""
    return min(stage_sizes(config, vocab_size), key=lambda size: size.total)


def _with_blocks(config: RunConfig, blocks: list[int], is_last: bool) -> RunConfig:
    """Return the configuration of a model of these blocks (from 0) alone."""
    stack, *_ = stacks(config)
    places = {block + 1: place for place, block in enumerate(blocks, 1)}
    layers = LayersConfig(
        at=[places[block] for block in stack.moe_blocks if block in places],
        insert_after=[places[block] for block in stack.layers.insert_after if block in places],
    )
    groups = [
        replace(group, layers=GroupLayersConfig(at=[places[n] for n in numbers if n in places]))
        for group, numbers in zip(config.moe.groups, group_layers(config), strict=True)
    ]
    model = replace(config.model, num_layers=len(blocks))
    if not is_last:
        model = replace(model, multi_token_prediction=replace(model.multi_token_prediction, depth=0))
    parallel = replace(config.parallel, pipeline=1, pipeline_chunks=1, blocks_per_stage=None)
    moe = replace(config.moe, layers=layers, groups=groups)
    return replace(config, model=model, parallel=parallel, moe=moe)


def balanced(work: list[float], after: float, parts: int, least: int = 1) -> list[int]:
    """Return how many of the blocks each part gets: the largest sum is smallest, and then that of squares.

    work: of each block. after: what the last part does besides. least: blocks of each part. Twice by dynamic
    programming over (part, first block), from the last part to the first.
    """
    sums = list(accumulate(work, initial=0.0))

    def best(
        cost: Callable[[float], float], join: Callable[[float, float], float]
    ) -> tuple[float, list[int]]:
        blocks = len(work)
        found = {
            first: (cost(sums[blocks] - sums[first] + after), [blocks - first])
            for first in range(blocks - least + 1)
        }
        for part in range(parts - 2, -1, -1):
            found = {
                first: min(
                    (join(cost(sums[end] - sums[first]), found[end][0]), [end - first, *found[end][1]])
                    for end in range(blocks - least * (parts - 1 - part), first + least - 1, -1)
                )
                for first in range(least * part, blocks - least * (parts - part) + 1)
            }
        return found[0]

    largest = best(lambda load: load, max)[0] * (1 + 1e-9)
    return best(lambda load: load * load if load <= largest else inf, lambda one, other: one + other)[1]


def drop_other_blocks(stage: StageBlocks, prefix: str, module: nn.Module) -> None:
    """Free the weights of a block of another stage as soon as it is built (see `units.Built`)."""
    found = OF_A_BLOCK.match(prefix)
    if found and not stage.has(int(found[1])):
        for parameter in module.parameters():
            parameter.data = parameter.data.new_empty(0)


class PipelineStage:
    """Cuts a decoder to a stage, and makes it ready for a pass through one of its chunks."""

    def __init__(self, model: Any, blocks: StageBlocks) -> None:
        """Cut `model`, a `GPT`."""
        self.blocks = blocks
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._decoder = model.model
        layers = self._decoder.decoder.layers
        for place in range(len(layers)):
            if not blocks.has(place):
                layers[place] = OtherStage(place + 1)
        needs_words = self._decoder.share_embeddings_and_output_weights
        needs_embedding = model.prediction is not None
        if not blocks.is_last:
            self._decoder.decoder.final_layernorm = None
            self._decoder.output_layer = None
            model.prediction = None
        if needs_words or needs_embedding:
            self._keep_copy_of_embedding(needs_embedding)
        elif not blocks.is_first:
            self._decoder.embedding = None
        self._final_norm = self._decoder.decoder.final_layernorm
        self.trained_elsewhere = sorted(trained - {name for name, _ in model.named_parameters()})

    def _keep_copy_of_embedding(self, whole: bool) -> None:
        """Mark the embedding of the first stage, and its copy on the last one, which the output layer or
        multi-token prediction uses; `whole`: with learned positions.
        """
        if not (self.blocks.is_first or self.blocks.is_last):
            self._decoder.embedding = None
            return
        embedding = self._decoder.embedding
        shared = embedding if whole else embedding.word_embeddings
        if self.blocks.is_last and not whole and hasattr(embedding, "position_embeddings"):
            del embedding.position_embeddings
        for parameter in shared.parameters():
            parameter.is_replicated = True
            parameter.counted_elsewhere = self.blocks.is_last  # in the norm, and in a checkpoint

    def enter(self, chunk: int, hidden_SBH: Tensor | None) -> None:
        """Prepare a pass through a chunk; hidden_SBH: from the part before, None for the model's first."""
        decoder, blocks = self._decoder, self.blocks
        decoder.pre_process = decoder.decoder.pre_process = blocks.begins(chunk)
        decoder.post_process = decoder.decoder.post_process = blocks.ends(chunk)
        decoder.decoder.final_layernorm = self._final_norm if blocks.ends(chunk) else None
        decoder.set_input_tensor(hidden_SBH)
        for place, block in enumerate(decoder.decoder.layers):
            if isinstance(block, Block):
                block.passed_over = place not in blocks.chunks[chunk]
