"""The model at the start of a run: built, loaded, and at ZeRO 3 cut, one part after the other."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import nn

from megamoe.checkpoint.format.meta import read_meta
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.checkpoint.init_from import InitialWeights
from megamoe.checkpoint.state import SavedWeights
from megamoe.config import RunConfig, to_dict
from megamoe.config.layer_kinds import LayerKind, kinds
from megamoe.config.schema import ModelConfig
from megamoe.config.shapes import moe_layer_numbers
from megamoe.model.architectures.decoder import GPT
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.block_specs import MoEFactory
from megamoe.model.build import build_model
from megamoe.model.stage import StageBlocks, drop_other_blocks
from megamoe.moe.capabilities import provides
from megamoe.parallel.consensus import call_on_all, catch_error, raise_any_error
from megamoe.parallel.launch import World
from megamoe.parallel.zero.partition import Partition
from megamoe.train.resolved import ResolvedRun

OF_LABELS = ("num_labels", "predicts", "pooling", "pooler")  # keys of a head that predicts labels
Weights = SavedWeights | InitialWeights  # where the weights come from, if not from the seed


def start_model(
    config: RunConfig,
    run: ResolvedRun,
    world: World,
    make_moe_layer: MoEFactory,
    saved: CheckpointReader | None,
    context: dist.ProcessGroup | None = None,
) -> LanguageModel:
    """Build the model on the CPU in fp32; at ZeRO 3 this rank keeps its slices alone, as they are to be.

    At ZeRO 3 the embedding and each block is drawn, loaded and cut before the next one is built. All ranks
    draw and load whole parts, so the weights are those of one rank. A pipeline stage draws all blocks, one
    after the other, and keeps its own.

    saved: the checkpoint from which the run goes on; None: it begins with what `checkpoint.init` names.
    context: see `build_model`.

    Raises:
        CollectiveError: on every rank, if weights cannot be loaded.
    """
    weights: Weights | None = None
    rank = world.rank
    if saved is not None:
        weights = SavedWeights(saved, run.plan.layout, rank)
    elif config.checkpoint.init.path is not None:
        weights = _initial_weights(config, run, rank)
    cut = Partition(run.filled, run.plan.precision) if run.plan.stage == 3 else None

    stage = None
    if config.parallel.pipeline > 1:
        stage = StageBlocks.of(config, run.plan.layout.pipeline_rank(rank), run.vocabulary.size)

    def built(prefix: str, module: nn.Module) -> None:
        if weights is not None:
            raise_any_error(catch_error(lambda: weights.fill(prefix, module)))
        if cut is not None:
            cut(module)

    each_part = built if cut is not None else None
    if stage is not None:
        each_part = partial(drop_other_blocks, stage)
    model = build_model(config, run.vocabulary.size, make_moe_layer, run.kernels, each_part, context)
    if stage is not None:
        assert isinstance(model, GPT)
        model.cut(stage)
    built("", model)
    if weights is not None:
        raise_any_error(catch_error(weights.finish))
    if saved is None:
        _tell_the_start(config, weights, world.say)
    return model


def _initial_weights(config: RunConfig, run: ResolvedRun, rank: int) -> InitialWeights:
    """Open the checkpoint of `checkpoint.init`; collective."""
    init, is_moe = config.checkpoint.init, bool(moe_layer_numbers(config))

    def opened() -> InitialWeights:
        new_head = _has_another_head(config, Path(str(init.path)))
        return InitialWeights(init, is_moe, run.plan.layout, rank, new_head, config.seed)

    return call_on_all(opened)


def _has_another_head(config: RunConfig, path: Path) -> bool:
    """Return whether this model predicts labels, and the saved one tokens or other labels."""
    saved = to_dict(ModelConfig()) | read_meta(path, "checkpoint.init.path")["config"]["model"]
    now = to_dict(config.model)
    return config.model.num_labels is not None and any(saved[key] != now[key] for key in OF_LABELS)


def _why_not_dense(kind: LayerKind) -> str | None:
    """Return why copies of a dense FFN do not compute what it does; None if they do, but for the noise.

    Each expert is the FFN, so the layer is the FFN times the sum of a token's weights.
    """
    moe = kind.moe
    selector, capacity, key = moe.router.selector, moe.router.capacity, kind.place("moe.router")
    scale = getattr(selector.options, "scale", 1.0)
    if not provides("normalised", selector) or scale != 1:
        return (
            f"the weights that {key}.selector {selector.name} gives to a token's experts do not sum to 1; "
            "choose at least two experts with weights: renormalised and scale: 1"
        )
    if capacity.name != "none":
        return f"{key}.capacity {capacity.name} drops pairs; set it to none"
    if moe.num_shared_experts:
        key = kind.place("moe.num_shared_experts")
        return f"shared experts, which are as drawn, add to it; set {key}=0"
    return None


def _tell_the_start(config: RunConfig, weights: Weights | None, say: Callable[[str], None]) -> None:
    """Say from which weights a new run starts, and what they do not contain."""
    init = config.checkpoint.init
    frozen = {kind.place("moe.frozen"): kind.moe.frozen for kind in kinds(config) if kind.moe.frozen}
    if isinstance(weights, InitialWeights):
        rest = f"; of the MoE layers as drawn: {', '.join(weights.kept)}" if weights.kept else ""
        head = "; its head is left out, the one for labels is as drawn" if weights.new_head else ""
        say(f"weights from {init.path}, experts: {init.experts}{rest}{head}")
        if init.experts == "copy" and (why := next(filter(None, map(_why_not_dense, kinds(config))), None)):
            say(f"warning: the model does not begin as the dense one: {why}")
        return
    for key, modules in frozen.items():
        say(f"{key}: {' and '.join(modules)} as drawn, for checkpoint.init.path is not set")
