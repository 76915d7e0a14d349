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
from megamoe.hf.quantised import FLOATS, Weights, weights_of
from megamoe.hf.rules import Rule
from megamoe.hf.tensor_files import Shape

HEAD, WORDS = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Source:
    """An open folder with what it says.

    tree: `model` and `moe` of our configuration. rules: in groups, see `Family.rules`. words: the rows of its
    embedding.
    """

    folder: Weights
    family: Family
    tree: Json
    config: RunConfig
    rules: list[list[Rule]]
    unused: list[str]

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
    folder = weights_of(Folder(path))
    family = family_of(folder.config, path / CONFIG)
    tree = family.read(folder.config, str(path / CONFIG))
    config = as_config(tree, str(path / CONFIG))
    rules = family.rules(config, int(config.model.vocab_size or 0))
    unused = _check_tensors(folder, family, config, rules)
    return Source(folder, family, tree, config, rules, unused)


def _check_tensors(folder: Weights, family: Family, config: RunConfig, groups: list[list[Rule]]) -> list[str]:
    """Check that the folder has the tensors of the rules; return those of no rule that may be left out."""
    expected = {name: shape for rule in _flat(groups) for name, shape in rule.source_shapes().items()}
    for name, shape in expected.items():
        _check_tensor(folder, name, shape, family)
    for rule in _flat(groups):
        dtypes = sorted({_name(folder.tensors[name].dtype) for name in rule.sources})
        if len(dtypes) > 1:
            raise UserError(
                f"{folder.path}: {shown(rule.sources[0])} and the tensors that belong to it have dtypes "
                f"{' and '.join(dtypes)}, expected one"
            )
    unused = []
    for name in sorted(folder.tensors.keys() - expected.keys()):
        patterns = [pattern.replace("{L}", str(config.model.num_layers)) for pattern in family.ignored]
        if name == HEAD and config.model.tie_embeddings:
            _check_tied(folder)
        elif any(re.fullmatch(pattern, name) for pattern in patterns):
            unused.append(name)
        else:
            raise UserError(
                f"{folder.path}: {shown(name)} has no place in {family.architecture} as {CONFIG} describes it"
            )
    return unused


def _check_tensor(folder: Weights, name: str, shape: Shape, family: Family) -> None:
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
    if stored.dtype not in FLOATS:
        raise UserError(
            f"{folder.path}: {shown(name)} is {_name(stored.dtype)}, expected float32, bfloat16 or float16"
        )


def _check_tied(folder: Weights) -> None:
    """A folder may hold the output layer beside the embedding whose weights it has."""
    if folder.tensors[HEAD].shape != folder.tensors[WORDS].shape or not torch.equal(
        folder.read(HEAD), folder.read(WORDS)
    ):
        raise UserError(f"{folder.path}: {HEAD} is not {WORDS}, but {CONFIG} says tie_word_embeddings: true")


def _flat(groups: Iterable[Iterable[Rule]]) -> list[Rule]:
    return [rule for group in groups for rule in group]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
