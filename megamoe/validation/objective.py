"""Checks of the training objective against the model, the parts of the MoE layers, and the data."""

from pathlib import Path
from typing import Any

from megamoe.config import RunConfig
from megamoe.data.card import LABELLED, PAIRS, is_pairs
from megamoe.errors import UserError
from megamoe.objectives.objective import objective_class
from megamoe.registry import get_part, list_parts

KEY = "train.objective"
KINDS = {"text": "prepared text", "pairs": "prepared pairs of texts", "labels": "JSON lines with labels"}


def check_objective(config: RunConfig) -> None:
    """Refuse an objective that does not fit the model's architecture or the rest of the configuration.

    Raises:
        UserError: naming both keys and the objectives that fit.
    """
    choice, architecture = config.train.objective, config.model.architecture
    part = objective_class(config)
    if not part.architectures:
        raise UserError(
            f"{KEY}: {choice.name}: its class must set architectures, those of model.architecture that it "
            f'trains, such as architectures = ("{architecture}",)'
        )
    if architecture not in part.architectures:
        known: dict[str, Any] = dict(list_parts("objective"))
        names = [name for name, each in known.items() if architecture in each.architectures]
        raise UserError(
            f"{KEY}: {choice.name} trains model.architecture {' or '.join(part.architectures)}, found "
            f"{architecture}; objectives for it: {', '.join(names) or 'none'}"
        )
    if (part.reads == "labels") != (config.model.num_labels is not None):
        expected = "an int, the number of the head's outputs" if part.reads == "labels" else "none"
        raise UserError(
            f"model.num_labels: found {config.model.num_labels or 'none'}, but {KEY} {choice.name} expects "
            f"{expected}"
        )
    if part.predicts is not None and part.predicts != config.model.predicts:
        raise UserError(
            f"model.predicts: found {config.model.predicts}, but {KEY} {choice.name} expects {part.predicts}"
        )
    try:
        part.check(choice.options, config)
    except ValueError as error:
        raise UserError(f"{KEY} {choice.name}: {error}") from None
    if architecture != "decoder":
        _check_parts(config, part.reads != "text")


def _check_parts(config: RunConfig, has_padding: bool) -> None:
    """Refuse what needs next tokens, or tokens without padding."""
    for name, loss in config.moe.losses.items():
        if get_part("loss", loss.name).needs_token_losses:
            raise UserError(
                f"moe.losses.{name}: needs the loss of each next token, which model.architecture "
                f"{config.model.architecture} does not have; leave it out"
            )
    if config.model.architecture == "encoder" and not has_padding:
        return
    refuse_routing_records(config, "a record holds one stack without padding")
    selector = config.moe.router.selector
    if "over_all_ranks" in get_part("selector", selector.name).provides(selector.options):
        raise UserError(
            f"moe.router.selector: {selector.name} with these options chooses for all ranks together, which "
            "needs equal numbers of tokens; padding makes them differ: choose another selector or its options"
        )


def refuse_routing_records(config: RunConfig, why: str) -> None:
    """Raise UserError if the configuration records or replays the routing."""
    for key, value in (("log.routing", config.log.routing), ("moe.router.replay", config.moe.router.replay)):
        if value is not None:
            raise UserError(f"{key}: found {value!r}, but {why}; leave it out")


def check_sources(config: RunConfig) -> None:
    """Refuse data of another kind than the objective reads: text, pairs, or texts with labels.

    Raises:
        UserError: naming the key, the path and a way out.
    """
    reads = objective_class(config).reads
    reads_pairs = reads == "pairs"
    name, data = config.train.objective.name, config.data
    named = {"data.sources": data.sources, **{f"data.validation.{k}": v for k, v in data.validation.items()}}
    for key, sources in named.items():
        for path in (source.path for source in sources):
            if path.endswith(LABELLED) != (reads == "labels"):
                way_out = (
                    "name a file such as labels/train.jsonl" if reads == "labels" else "prepare it first"
                )
                raise UserError(f"{key}: {path!r}, but {KEY} {name} reads {KINDS[reads]}; {way_out}")
            if is_pairs(path) and not reads_pairs:
                raise UserError(
                    f"{key}: {path!r} holds pairs of texts, which {KEY} {name} does not read; choose "
                    f"translation, or name one side, such as {path}.source"
                )
            if reads_pairs and not is_pairs(path):
                raise UserError(
                    f"{key}: {path!r} holds no pairs of texts, which {KEY} {name} reads: there is no file "
                    f"{path + PAIRS!r}; {_pairs_near(path)}"
                )


def _pairs_near(path: str) -> str:
    """Return a way out for a path that names no pairs: those in its folder, or in it."""
    folders = (Path(path).parent, Path(path), Path(path) / "pairs")
    found = sorted(card for folder in folders if folder.is_dir() for card in folder.glob(f"*{PAIRS}"))
    names = [str(card).removesuffix(PAIRS) for card in found]
    return f"there is {', '.join(names)}" if names else "make it with tools/prepare_pairs.py"
