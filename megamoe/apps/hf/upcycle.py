"""Several dense models of one architecture as one MoE model: their FFNs are its experts, the rest is a mean.

Source: Sukhbaatar et al. 2024 (Branch-Train-MiX, arXiv 2403.07816), section 3.2 (top-2, a softmax of the
scores of the two) and 4.1.1 (a balance loss of weight 0.01); FlexOlmo (Shi et al. 2025). Both train the
models apart, from one start. The routers are new: draws of a small normal distribution.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.apps.hf.folder import CONFIG, GENERATION, read_other_files, short
from megamoe.apps.hf.import_folder import Source, open_source, write_run
from megamoe.apps.hf.keys import Json
from megamoe.apps.hf.rules import EXPERT_DOWN, EXPERT_UP, WHOLE, BlockMapping, flat, of_each_expert, whole
from megamoe.apps.hf.tensor_files import Stored
from megamoe.config import to_dict
from megamoe.errors import UserError

UP, DOWN = "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"
EXPERTS = {UP: ("mlp.layer.experts.up", EXPERT_UP), DOWN: ("mlp.layer.experts.down", EXPERT_DOWN)}
ROUTER = "mlp.layer.router.scorer.weight"
ROUTER_STD = 0.02
BALANCE = 0.01  # weight of the balance loss in the run's YAML, as in Branch-Train-MiX


@dataclass(frozen=True)
class MergedWeights:
    """Reads tensors of several folders as `Weights` does.

    A name is that of a tensor of all folders, which are averaged in fp64; or the number of a folder and a
    name, `1:name`; or a router's, `router:block`. routers: the routers' shapes by block.
    """

    sources: Sequence[Source]
    routers: Mapping[int, tuple[int, ...]]
    seed: int

    @property
    def path(self) -> Path:
        """The first folder, for messages."""
        return self.sources[0].folder.path

    @property
    def config(self) -> Json:
        """The first folder's config.json."""
        return self.sources[0].folder.config

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        """Every tensor by name."""
        first = self.sources[0].folder.tensors
        found = dict(first)
        for number, source in enumerate(self.sources):
            found |= {f"{number}:{name}": stored for name, stored in source.folder.tensors.items()}
        dtype = next(iter(first.values())).dtype
        return found | {f"router:{block}": Stored(dtype, shape) for block, shape in self.routers.items()}

    def read(self, name: str) -> Tensor:
        """Return a tensor, or the mean of the folders' tensors."""
        kind, colon, inside = name.partition(":")
        if kind == "router" and colon:
            block = int(inside)
            generator = torch.Generator().manual_seed((self.seed << 16) + block)
            drawn = ROUTER_STD * torch.randn(self.routers[block], generator=generator)
            return drawn.to(self.tensors[name].dtype)
        if colon:
            return self.sources[int(kind)].folder.read(inside)
        read = [source.folder.read(name) for source in self.sources]
        total = sum((tensor.double() for tensor in read), torch.zeros_like(read[0], dtype=torch.float64))
        return (total / len(read)).to(read[0].dtype)


def upcycle(
    folders: Sequence[Path], run: Path, *, k: int = 2, seed: int = 0, report: Callable[[str], None] = print
) -> None:
    """Write a run's folder with the MoE model of dense Hugging Face folders, whole or not at all.

    k: the experts of a token. seed: of the routers' draws.

    Raises:
        UserError: for fewer than two folders, for MoE models, for models or tokenizers that differ, or if
            `run` exists.
    """
    if len(folders) < 2:
        raise UserError("upcycle: name two or more folders; one model is upcycled by checkpoint.init.experts")
    if not 1 <= k <= len(folders):
        raise UserError(f"--top-k: found {k}, expected 1 to {len(folders)}, the number of folders")
    sources = [open_source(folder) for folder in folders]
    kept = read_other_files(folders[0])
    for folder, source in zip(folders, sources, strict=True):
        _check_dense(folder, source)
        _check_same(folder, source, folders[0], sources[0])
        _check_tokenizer(folder, folders[0], kept)
    write_run(_merged(sources, k, seed), kept, run, report=report)


def _merged(sources: Sequence[Source], k: int, seed: int) -> Source:
    first, count = sources[0], len(sources)
    routers: dict[int, tuple[int, ...]] = {}
    rules = []
    for group in first.rules:
        found = []
        for rule in group:
            ending = next((name for name in EXPERTS if rule.target.endswith(name)), None)
            found.append(rule if ending is None else _of_experts(rule, ending, count))
            if ending == UP:
                block = len(routers)
                routers[block] = (count, rule.shape[1])
                target = rule.target.removesuffix(UP) + ROUTER
                names = (f"router:{block}",)
                found.append(BlockMapping(target, routers[block], names, whole, WHOLE, False, rule.dims))
        rules.append(found)
    down = next(rule for rule in flat(first.rules) if rule.target.endswith(DOWN))
    weights = "renormalised" if k > 1 else "raw"  # renormalised, the weight of one expert teaches no router
    moe = {
        "layers": {"every": 1},
        "num_experts": count,
        "expert_ffn_hidden_size": down.shape[1],
        "router": {"selector": {"name": "top_k", "k": k, "weights": weights}},
        "losses": {"switch_balance": BALANCE} if k < count else {},  # nothing to balance where all are chosen
    }
    folder: Any = MergedWeights(sources, routers, seed)
    return replace(first, folder=folder, tree={**first.tree, "moe": moe}, rules=rules)


def _of_experts(rule: BlockMapping, ending: str, count: int) -> BlockMapping:
    """Return the rule of an expert weight, which holds the dense weight of each folder."""
    name, cut = EXPERTS[ending]
    return replace(
        rule,
        target=rule.target.removesuffix(ending) + name,
        shape=(count, *rule.shape),
        sources=tuple(f"{number}:{source}" for number in range(count) for source in rule.sources),
        split=of_each_expert(rule.split),
        cut=cut,
    )


def _check_dense(folder: Path, source: Source) -> None:
    targets = [rule.target for rule in flat(source.rules)]
    if source.tree["moe"].get("layers") != "none" or not any(name.endswith(UP) for name in targets):
        raise UserError(f"{folder / CONFIG}: it is an MoE model, expected a dense one")
    if any(".mlp." in name and name.endswith(".bias") for name in targets):
        raise UserError(f"{folder / CONFIG}: the FFNs have biases, which experts do not take")


def _check_same(folder: Path, source: Source, first_folder: Path, first: Source) -> None:
    """Refuse a model that is not of the first one's kind: every key of `model` and every dtype."""
    ours, theirs = to_dict(first.config.model), to_dict(source.config.model)
    for key, value in ours.items():
        if theirs[key] != value:
            raise UserError(
                f"{folder / CONFIG}: model.{key} is {short(str(theirs[key]))}, but {short(str(value))} in "
                f"{first_folder}; upcycle models of one architecture"
            )
    for name, stored in first.folder.tensors.items():
        other = source.folder.tensors.get(name)
        if other is not None and other.dtype != stored.dtype:
            raise UserError(f"{folder}: {short(name)} is {other.dtype}, but {stored.dtype} in {first_folder}")


def _check_tokenizer(folder: Path, first_folder: Path, kept: Mapping[str, bytes]) -> None:
    others = read_other_files(folder)
    for name in sorted((kept.keys() | others.keys()) - {GENERATION}):
        if kept.get(name) != others.get(name):
            raise UserError(
                f"{folder / name} is not that of {first_folder}; the models must have one tokenizer, or a "
                "token would mean different words to them"
            )
