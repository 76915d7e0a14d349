"""Predictions of a fine-tuned model on files of examples, at any layout."""

import torch

from megamoe.analysis.trained_model import TrainedModel
from megamoe.data.batches import Batch, Item
from megamoe.objectives.labelled import Example, Labelled
from megamoe.parallel.consensus import gather_from_ranks
from megamoe.tasks.files import Row
from megamoe.train.step import model_inputs, set_context


@torch.no_grad()
def predict(trained: TrainedModel, path: str, batch_size: int) -> list[Row]:
    """Return what the model predicts of each example of a file, in its order. Collective over all ranks.

    The examples are sorted by length and cut into batches, which go to the data-parallel ranks in turn. The
    batches, and so their capacities, are the same at every layout.

    Raises:
        UserError: as `Labelled.open`.
    """
    objective = trained.objective
    assert isinstance(objective, Labelled)
    examples = objective.open(path)
    order = sorted(range(len(examples)), key=lambda place: len(examples[place].tokens_S))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    data = trained.layout.data
    found: dict[int, Row] = {}
    for round_ in range(-(-len(batches) // data)):
        number = round_ * data + trained.layout.data_rank(trained.world.rank)
        # Every rank takes part in every round: experts may lie on several of them.
        places = batches[number] if number < len(batches) else []
        found |= _predicted(trained, objective, examples, places, number)
    everything: dict[int, Row] = {}
    for part in gather_from_ranks(found):
        everything |= part
    return [everything[place] for place in range(len(examples))]


def _predicted(
    trained: TrainedModel, objective: Labelled, examples: list[Example], places: list[int], number: int
) -> dict[int, Row]:
    """Return the predictions of a batch, by the examples' numbers."""
    items: list[Item] = [examples[place].item() for place in places] or [objective.no_item()]
    batch: Batch = objective.make_batch(items, places or [0]).to(trained.world.device)
    set_context(trained.context, batch, number)
    trained.model(**model_inputs(batch))
    logits = trained.model.label_logits()
    assert logits is not None
    host = logits.float().cpu()
    return {place: objective.prediction(examples[place], host[row]) for row, place in enumerate(places)}
