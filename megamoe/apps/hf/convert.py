"""The classes by the config.json of a folder, and the map between its tensors and ours, checked."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from megamoe.apps.hf.families import FAMILIES, REFUSED
from megamoe.apps.hf.family import HEAD, WORDS, Family, as_config
from megamoe.apps.hf.folder import CONFIG, Folder, shown
from megamoe.apps.hf.keys import Json
from megamoe.apps.hf.quantised import FLOATS, Weights, weights_of
from megamoe.apps.hf.rules import Rule, flat
from megamoe.apps.hf.tensor_files import Shape
from megamoe.config import RunConfig
from megamoe.errors import UserError

INVERSE_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
FURTHER_OPTION = "--multi-token-prediction"


@dataclass(frozen=True)
class Source:
    """An open folder with what it says.

    tree: `model` and `moe` of our configuration. rules: in groups, see `Family.rules`. unused: the tensors
    that are left out, by the reason.
    """

    folder: Weights
    family: Family
    tree: Json
    config: RunConfig
    rules: list[list[Rule]]
    unused: dict[str, list[str]]

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
    if isinstance(found, str) and found in REFUSED:
        nearest, difference = REFUSED[found]
        raise UserError(
            f"{where}: model_type: {found} cannot be converted; the nearest is {nearest}, from which it "
            f"differs by {difference}"
        )
    if not isinstance(found, str) or found not in FAMILIES:
        raise UserError(
            f"{where}: model_type: found {shown(str(found))}, expected one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[found]


def open_source(path: Path, further: bool = False) -> Source:
    """Open a folder and check that every tensor that its class has is there, and no other.

    further: with the blocks of multi-token prediction; otherwise they may be there and are left out.

    Raises:
        UserError: naming the first file, key or tensor that is missing, damaged, unknown or of another shape.
    """
    folder = weights_of(Folder(path))
    family = family_of(folder.config, path / CONFIG)
    tree = family.read(folder.config, str(path / CONFIG))
    config = as_config(tree, str(path / CONFIG))
    depth = family.depth(config)
    if further and not depth:
        raise UserError(
            f"{path / CONFIG}: {family.architecture} has no multi-token prediction here; leave out "
            f"{FURTHER_OPTION}"
        )
    if not further:
        tree["model"].pop("multi_token_prediction", None)
        config = as_config(tree, str(path / CONFIG))
    rules = family.rules(config, int(config.model.vocab_size or 0))
    unused = _check_tensors(folder, family, config, rules, 0 if further else depth)
    return Source(folder, family, tree, config, rules, unused)


def _check_tensors(
    folder: Weights, family: Family, config: RunConfig, groups: list[list[Rule]], left_out: int
) -> dict[str, list[str]]:
    """Check that the folder has the tensors of the rules; return those that may be left out, by the reason.

    left_out: the blocks of multi-token prediction that may be there without a rule.
    """
    expected = {name: shape for rule in flat(groups) for name, shape in rule.source_shapes().items()}
    for name, shape in expected.items():
        _check_tensor(folder, name, shape, family)
    for rule in flat(groups):
        dtypes = sorted({_name(folder.tensors[name].dtype) for name in rule.sources})
        if len(dtypes) > 1:
            raise UserError(
                f"{folder.path}: {shown(rule.sources[0])} and the tensors that belong to it have dtypes "
                f"{' and '.join(dtypes)}, expected one"
            )
    copies = family.copies(config) | ({HEAD: WORDS} if config.model.tie_embeddings else {})
    last = config.model.num_layers
    blocks = tuple(f"model.layers.{block}." for block in range(last, last + left_out))
    unused: dict[str, list[str]] = {}
    for name in sorted(folder.tensors.keys() - expected.keys()):
        if name in copies:
            _check_copy(folder, name, copies[name])
        elif INVERSE_FREQUENCIES.fullmatch(name):
            unused.setdefault("for they follow from the configuration", []).append(name)
        elif name.startswith(blocks):
            unused.setdefault(f"for want of {FURTHER_OPTION}", []).append(name)
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


def _check_copy(folder: Weights, name: str, main: str) -> None:
    """Check that a tensor is the same as another, which the model has once: a tied weight."""
    same_shape = folder.tensors[name].shape == folder.tensors[main].shape
    if not same_shape or not torch.equal(folder.read(name), folder.read(main)):
        raise UserError(f"{folder.path}: {shown(name)} is not {main}, of which it must be a copy")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
