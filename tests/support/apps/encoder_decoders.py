"""Tiny encoder-decoders as a checkpoint would open them; they need the fixture `one_rank`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.translate import Sentences, TranslationDirection
from megamoe.apps.routing_record.replay import RunRouting
from megamoe.data.tokenizers import ByteTokenizer
from megamoe.data.vocabulary import Vocabulary
from megamoe.model.architectures.encoder_decoder import EncoderDecoder
from megamoe.moe.context import MicroBatch
from megamoe.moe.part import StepContext
from megamoe.parallel.launch import find_world
from megamoe.parallel.layout import Layout
from megamoe.train.resolved import resolve_run
from tests.support.tiny import tiny, tiny_model

END = 0
DIRECTION = TranslationDirection("en", "de")
SOURCES = [[5, 7, 11, 2, END], [4, END], [3, 9, 2, 13, 3, 9, 2, 13, END], [6, 6, 6, END]]


def opened(*overrides: str, vocabulary: int = 16, bumps: float = 0.3) -> TrainedModel:
    """Return a model of two encoder and two decoder blocks; bumps: of norms and biases around 1 and 0."""
    config = tiny(
        "model.architecture=encoder_decoder",
        "train.objective=span_corruption",
        f"model.vocab_size={vocabulary}",
        "model.vocab_multiple=1",
        "model.init_std=0.4",
        "data.sequence_length=24",
        "moe.layers=none",
        *overrides,
    )
    context = StepContext(step=5)
    model = tiny_model(config, context, vocabulary).eval()
    assert isinstance(model, EncoderDecoder)
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += bumps * torch.randn(parameter.shape, generator=generator)
    meta: Any = {"step": 5, "config": {"train": {"micro_batch_size": 2}}}
    world, routing = find_world(), RunRouting(resolve_run(config, 1), find_world())
    known = Vocabulary(vocabulary, END, ByteTokenizer(), in_data=vocabulary)
    path = Path("runs/tiny/checkpoints/step_00000005")
    return TrainedModel(path, meta, config, model, context, Layout(1), world, known, "fp32", routing)


def sentences(sources: list[list[int]]) -> Sentences:
    """Return sources of token ids to translate."""
    return Sentences([""] * len(sources), sources, None, 0)


def whole_logits(trained: TrainedModel, source: list[int], target: list[int]) -> Tensor:
    """The oracle: the logits at each place of a target, from one pass over it alone, fp32 [S, vocabulary]."""
    return whole_batch(trained, source, [target])[0]


@torch.no_grad()
def whole_batch(trained: TrainedModel, source: list[int], targets: list[list[int]]) -> Tensor:
    """The oracle for B targets of one length, fp32 [B, S, vocabulary]; B = 1 with MoE layers."""
    model, context = trained.model, trained.context
    assert isinstance(model, EncoderDecoder)
    source_BL, tokens_BS = torch.tensor([source] * len(targets)), torch.tensor(targets)
    # The layers of both stacks see plain sequences: nothing is padding, one sequence.
    context.batch = MicroBatch(source=MicroBatch(torch.arange(len(source)), torch.tensor(source)))
    positions = [torch.arange(side.shape[1]).expand_as(side) for side in (tokens_BS, source_BL)]
    return model.whole_logits(tokens_BS, positions[0], source_BL, positions[1])
