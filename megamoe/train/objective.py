"""The training objective of a run: the object, and what follows from it for vocabulary and FLOPs."""

from dataclasses import replace

from megamoe.config import RunConfig
from megamoe.data.stored import localized
from megamoe.data.vocabulary import Vocabulary
from megamoe.model.size import StackShares
from megamoe.objectives.objective import TrainingObjective, objective_class
from megamoe.registry import naming_failures


def localized_run(config: RunConfig) -> RunConfig:
    """Return the configuration with local copies in place of data that URLs name; itself without URLs.

    Raises:
        UserError: as `localized`.
    """
    data = localized(config.data)
    return config if data is config.data else replace(config, data=data)


def data_vocabulary(config: RunConfig) -> Vocabulary:
    """Return the vocabulary of the data, without the objective's own ids.

    Raises:
        UserError: for files, a tokenizer or a `model.vocab_size` that do not fit each other.
    """
    return objective_class(config).data_vocabulary(localized_run(config))


def num_added_ids(config: RunConfig, vocabulary: Vocabulary) -> int:
    """Return the number of ids that the objective needs after the data's vocabulary."""
    return objective_class(config).added_ids(config.train.objective.options, config, vocabulary)


def token_shares(config: RunConfig) -> StackShares:
    """Return what is computed of each token of the data, for the model FLOPs."""
    found = objective_class(config).shares(config.train.objective.options, config)
    return StackShares({"encoder": found.encoder, "decoder": found.decoder}, found.predicted)


def build_objective(config: RunConfig, vocabulary: Vocabulary) -> TrainingObjective:
    """Return the objective; vocabulary: with its own ids.

    Raises:
        UserError: if the vocabulary lacks what it needs, or a plugin's objective fails.
    """
    part = objective_class(config)
    with naming_failures(part, f"train.objective: {config.train.objective.name}"):
        return part(config.train.objective.options, config, vocabulary)
