"""Checks of the training objective against the model, the parts of the MoE layers, and the data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megamoe.config import RunConfig
from megamoe.data.card import LABELLED, PAIRS, is_pairs
from megamoe.errors import Problem, UserError
from megamoe.objectives.objective import objective_class
from megamoe.registry import get_part, list_parts
from megamoe.validation.layer_groups import of_each_kind

KEY = "train.objective"
KINDS = {"text": "prepared text", "pairs": "prepared pairs of texts", "labels": "JSON lines with labels"}


def objective_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield why the objective does not fit the model's architecture or the rest of the configuration."""
    choice, architecture = config.train.objective, config.model.architecture
    try:
        part = objective_class(config)
    except UserError as error:
        yield Problem.of(error)
        return
    if not part.architectures:
        yield Problem(
            KEY,
            f"{choice.name}: its class must set architectures, those of model.architecture that it trains, "
            f'such as architectures = ("{architecture}",)',
        )
        return
    if architecture not in part.architectures:
        known: dict[str, Any] = dict(list_parts("objective"))
        names = [name for name, each in known.items() if architecture in each.architectures]
        yield Problem(
            KEY,
            f"{choice.name} trains model.architecture {' or '.join(part.architectures)}, found "
            f"{architecture}; objectives for it: {', '.join(names) or 'none'}",
        )
        return
    if architecture != "decoder" or part.pads:
        yield from _part_problems(config, part.pads or part.reads != "text")
    if (part.reads == "labels") != (config.model.num_labels is not None):
        expected = "an int, the number of the head's outputs" if part.reads == "labels" else "none"
        yield Problem(
            "model.num_labels",
            f"found {config.model.num_labels or 'none'}, but {KEY} {choice.name} expects {expected}",
        )
        return
    if part.predicts is not None and part.predicts != config.model.predicts:
        wanted = f"but {KEY} {choice.name} expects {part.predicts}"
        yield Problem("model.predicts", f"found {config.model.predicts}, {wanted}")
        return
    try:
        part.check(choice.options, config)
    except ValueError as error:
        yield Problem(KEY, f"{choice.name}: {error}")


def _part_problems(config: RunConfig, has_padding: bool) -> Iterator[Problem]:
    """Yield what needs next tokens, or tokens without padding."""
    yield from of_each_kind(config, _loss_problems)
    if config.model.architecture == "encoder" and not has_padding:
        return
    yield from routing_record_problems(config, "a record holds one stack without padding")


def _loss_problems(config: RunConfig) -> Iterator[Problem]:
    for name, loss in config.moe.losses.items():
        if get_part("loss", loss.name).needs_token_losses:
            yield Problem(
                f"moe.losses.{name}",
                f"needs the loss of each next token, which model.architecture {config.model.architecture} "
                f"with {KEY} {config.train.objective.name} does not have; leave it out",
            )


def routing_record_problems(config: RunConfig, why: str) -> Iterator[Problem]:
    """Yield the keys that record or replay the routing. why: this cannot be done."""
    for key, value in (("log.routing", config.log.routing), ("moe.router.replay", config.moe.router.replay)):
        if value is not None:
            yield Problem(key, f"found {value!r}, but {why}; leave it out")


def source_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield data of another kind than the objective reads: text, pairs, or texts with labels."""
    reads = objective_class(config).reads
    reads_pairs = reads == "pairs"
    name, data = config.train.objective.name, config.data
    named = {"data.sources": data.sources, **{f"data.validation.{k}": v for k, v in data.validation.items()}}
    for key, sources in named.items():
        for path in (source.path for source in sources):
            if path.endswith(LABELLED) != (reads == "labels"):
                way_out = "name a .jsonl file" if reads == "labels" else "prepare it first"
                yield Problem(key, f"{path!r}, but {KEY} {name} reads {KINDS[reads]}; {way_out}")
            elif is_pairs(path) and not reads_pairs:
                yield Problem(
                    key,
                    f"{path!r} holds pairs of texts, which {KEY} {name} does not read; choose translation, "
                    f"or name one side, such as {path}.source",
                )
            elif reads_pairs and not is_pairs(path):
                yield Problem(
                    key,
                    f"{path!r} holds no pairs of texts, which {KEY} {name} reads: there is no file "
                    f"{path + PAIRS!r}; {_pairs_near(path)}",
                )


def _pairs_near(path: str) -> str:
    """Return a way out for a path that names no pairs: those in its folder, or in it."""
    folders = (Path(path).parent, Path(path), Path(path) / "pairs")
    found = sorted(card for folder in folders if folder.is_dir() for card in folder.glob(f"*{PAIRS}"))
    names = [str(card).removesuffix(PAIRS) for card in found]
    return f"there is {', '.join(names)}" if names else "make it with tools/prepare_pairs.py"
