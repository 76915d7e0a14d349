"""The classes by the config.json of a folder, and the map between its tensors and ours, checked."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from megamoe.config import RunConfig
from megamoe.errors import UserError
from megamoe.hf.families import FAMILIES
from megamoe.hf.family import Family, as_config
from megamoe.hf.folder import CONFIG, Folder, shown
from megamoe.hf.keys import Json
from megamoe.hf.rules import Rule

HEAD, WORDS = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Source:
    """An open folder with what it says.

    tree: `model` and `moe` of our configuration. rules: in groups, see `Family.rules`. words: the rows of its
    embedding.
    """

    folder: Folder
    family: Family
    tree: Json
    config: RunConfig
    rules: list[list[Rule]]

    @property
    def words(self) -> int:
        """The number of rows of the embedding."""
        return int(self.config.model.vocab_size or 0)


def family_of(config: Json, where: Path) -> Family:
    """Return the class that a config.json names.

    Raises:
        UserError: if it cannot be converted; the message names those that can.
    """
    found = config.get("model_type")
    if not isinstance(found, str) or found not in FAMILIES:
        raise UserError(
            f"{where}: model_type: found {shown(str(found))}, expected one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[found]


def open_source(path: Path) -> Source:
    """Open a folder and check that every tensor that its class has is there, and no other.

    Raises:
        UserError: naming the first file, key or tensor that is missing, damaged, unknown or of another shape.
    """
    folder = Folder(path)
    family = family_of(folder.config, path / CONFIG)
    tree = family.read(folder.config, str(path / CONFIG))
    config = as_config(tree, str(path / CONFIG))
    rules = family.rules(config, int(config.model.vocab_size or 0))
    _check_tensors(folder, family, config, rules)
    return Source(folder, family, tree, config, rules)


def _check_tensors(folder: Folder, family: Family, config: RunConfig, groups: list[list[Rule]]) -> None:
    expected = {name: shape for rule in _flat(groups) for name, shape in rule.source_shapes().items()}
    for name, shape in expected.items():
        stored = folder.tensors.get(name)
        if stored is None:
            raise UserError(
                f"{folder.path}: {shown(name)} is missing, which {family.architecture} has; expected shape "
                f"{list(shape)}"
            )
        if stored.shape != shape:
            raise UserError(
                f"{folder.path}: {shown(name)} has shape {list(stored.shape)}, {CONFIG} says {list(shape)}"
            )
        if not stored.dtype.is_floating_point:
            raise UserError(f"{folder.path}: {shown(name)} is {_name(stored.dtype)}, expected numbers with a point")
    for name in sorted(folder.tensors.keys() - expected.keys()):
        if any(re.fullmatch(pattern, name) for pattern in family.ignored):
            continue
        if name == HEAD and config.model.tie_embeddings:
            _check_tied(folder)
            continue
        raise UserError(
            f"{folder.path}: {shown(name)} has no place in {family.architecture} as {CONFIG} describes it"
        )
    for rule in _flat(groups):
        dtypes = sorted({_name(folder.tensors[name].dtype) for name in rule.sources})
        if len(dtypes) > 1:
            raise UserError(
                f"{folder.path}: {shown(rule.sources[0])} and the tensors that belong to it have dtypes "
                f"{' and '.join(dtypes)}, expected one"
            )


def _check_tied(folder: Folder) -> None:
    """A folder may hold the output layer beside the embedding whose weights it has."""
    if folder.tensors[HEAD].shape != folder.tensors[WORDS].shape or not torch.equal(
        folder.read(HEAD), folder.read(WORDS)
    ):
        raise UserError(
            f"{folder.path}: {HEAD} is not {WORDS}, but {CONFIG} says tie_word_embeddings: true"
        )


def _flat(groups: Iterable[Iterable[Rule]]) -> list[Rule]:
    return [rule for group in groups for rule in group]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
