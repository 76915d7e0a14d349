"""A tiny model as a checkpoint would open it, and its data; needs the fixture `one_rank`."""

from pathlib import Path
from typing import Any

from megamoe.apps.evaluation.perplexity import validation_sets
from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.routing_record.replay import RunRouting
from megamoe.data.vocabulary import Vocabulary
from megamoe.moe.part import StepContext
from megamoe.parallel.launch import find_world
from megamoe.parallel.layout import Layout
from megamoe.train.resolved import resolve_run
from tests.support.tiny import VOCABULARY, tiny, tiny_model

SAMPLES, TOKENS = 8, 64  # sequences of 8 tokens


def opened(*overrides: str) -> TrainedModel:
    """Return a model of two MoE blocks of four experts, after step 5."""
    config = tiny("model.init_std=0.3", *overrides)
    context = StepContext(step=5)
    words = VOCABULARY + (config.model.architecture == "encoder")  # the mask's is the last
    model = tiny_model(config, context, words).eval()
    meta: Any = {"step": 5, "config": {"train": {"micro_batch_size": 2}}}
    vocabulary = Vocabulary(VOCABULARY, 0, None)
    path = Path("runs/tiny/checkpoints/step_00000005")
    world = find_world()
    routing = RunRouting(resolve_run(config, 1), world)
    return TrainedModel(path, meta, config, model, context, Layout(1), world, vocabulary, "fp32", routing)


def data_of(trained: TrainedModel) -> Any:
    """Return its validation set."""
    return validation_sets(trained, SAMPLES)[0]["valid"]
