"""From a Hugging Face folder to a checkpoint of ours and a run that continues it.

RUN/checkpoints/step_00000000/     the checkpoint: for checkpoint.init.path, and for the tools
RUN/checkpoints/latest
RUN/hf/                            config.json, generation_config.json and the tokenizer, as they were
RUN/continue.yaml                  a run that goes on from the checkpoint

The folder is read and the checkpoint is written tensor by tensor, by the class that config.json names and its
map between their tensors and ours, which is checked.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.apps.checkpoints.stream import Stored, new_tree, one_rank, tensor_writer
from megamoe.apps.hf.custom.export import FAMILY, family_of_folder
from megamoe.apps.hf.families import FAMILIES
from megamoe.apps.hf.families.common import HF_HEAD, HF_WORDS
from megamoe.apps.hf.family import Family, as_config
from megamoe.apps.hf.folder import CONFIG, GENERATION, Folder, dtype_name, portable, read_other_files, short
from megamoe.apps.hf.keys import OF_OTHERS, Json
from megamoe.apps.hf.quantised import FLOATS, Weights, weights_of
from megamoe.apps.hf.rules import BlockMapping, flat
from megamoe.apps.hf.tensor_files import Shape
from megamoe.checkpoint.format.files import FORMAT, INDEX, META, sha256, shard_file, write_sums
from megamoe.checkpoint.format.folder import KEPT, LATEST
from megamoe.checkpoint.format.reader import WEIGHT
from megamoe.config import RunConfig, parse_config, to_dict
from megamoe.config.schema import Precision
from megamoe.config.yaml_text import dump
from megamoe.errors import UserError

CHECKPOINTS, STEP, RUN_YAML = "checkpoints", "step_00000000", "continue.yaml"
PRECISIONS: dict[str, Precision] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
LONGEST = 4096  # tokens of a sequence in the run's YAML, where the model allows more
VOCABULARY_MULTIPLE = 64  # the embedding is not padded: its rows are divided by a divisor of this
INVERSE_FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


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
    rules: list[list[BlockMapping]]
    unused: dict[str, list[str]]

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding."""
        return int(self.config.model.vocab_size or 0)


def import_folder(source: Path, run: Path, *, report: Callable[[str], None] = print) -> None:
    """Write a run's folder from a Hugging Face folder, whole or not at all.

    Raises:
        UserError: if `run` exists, the folder cannot be converted (`open_source`), or the model could not be
            opened afterwards.
    """
    opened = open_source(source)
    kept = read_other_files(source)
    tokenizer = str(run / KEPT) if kept.keys() - {GENERATION} else None
    kept[CONFIG] = (json.dumps(portable(opened.folder.config), indent=2) + "\n").encode()
    with new_tree(run, source) as folder:
        checkpoint = folder / CHECKPOINTS / STEP
        checkpoint.mkdir(parents=True)
        config = {"name": run.name, **_sections(opened, tokenizer)}
        _check_opens(parse_config(config), _precision(opened), source / CONFIG)
        _write_checkpoint(checkpoint, opened, config)
        (folder / CHECKPOINTS / LATEST).write_text(STEP, encoding="utf-8")
        (folder / KEPT).mkdir()
        for name, content in kept.items():
            (folder / KEPT / name).write_bytes(content)
        (folder / RUN_YAML).write_text(_run_yaml(opened, source, run, tokenizer), encoding="utf-8")
    report(f"{source}: {opened.family.architecture}, {_size(opened)}")
    if others := sorted(OF_OTHERS & opened.folder.config.keys()):
        report(f"ignored keys of {CONFIG}: {', '.join(others)}")
    if opened.tree["moe"].get("frozen"):
        report(
            "moe.frozen: [router]: the weight of a token's one expert is always 1, which gives the router no "
            "gradient"
        )
    for why, names in opened.unused.items():
        report(f"left out {why}: {len(names)} tensors, the first of them {short(names[0])}")
    report(f"{run / CHECKPOINTS / STEP}: the checkpoint; {run / RUN_YAML}: a run that continues it")


def _precision(source: Source) -> Precision:
    """Return the precision of the run's weights, in which they are opened unless the user names another."""
    return PRECISIONS.get(dtype_name(source.folder.tensors), "fp32")


def _check_opens(config: RunConfig, precision: Precision, where: Path) -> None:
    """Refuse a model that could not be opened afterwards in that precision.

    Raises:
        UserError: with the first reason.
    """
    from megamoe.validation.run import section_problems  # imports DeepSpeed and Megatron-Core

    for problem in section_problems(config, 1, precision):
        way_out = "" if any(section_problems(config, 1, "fp32")) else "; save the folder's weights in fp32"
        raise UserError(f"{where}: a model with it cannot be opened here: {problem}{way_out}")


def _write_checkpoint(folder: Path, source: Source, config: Json) -> None:
    """Write a file for each group of rules: one for what stands once, one for each block."""
    tensors: dict[str, Any] = {}
    shardings: dict[str, Any] = {}
    for number, group in enumerate(source.rules):
        announced = {f"{WEIGHT}{rule.target}": Stored(_dtype(source, rule), rule.shape) for rule in group}
        with tensor_writer(folder / shard_file(number), announced) as write:
            for rule in group:
                write(f"{WEIGHT}{rule.target}", _assembled(source, rule))
        tensors |= {name: stored.index_entry(number) for name, stored in announced.items()}
        shardings |= {rule.target: rule.cut.to_json() for rule in group if not rule.is_buffer}
    texts = {
        META: json.dumps(_meta(source, to_dict(parse_config(config)), _precision(source)), indent=1),
        INDEX: json.dumps({"tensors": dict(sorted(tensors.items())), "shardings": shardings}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
    write_sums(folder, {path.name: sha256(path) for path in folder.iterdir()})


@torch.no_grad()
def _assembled(source: Source, rule: BlockMapping) -> Tensor:
    """Return one of our tensors, made of those of the folder."""
    ours = torch.empty(rule.shape, dtype=_dtype(source, rule))
    for name, (view, _) in rule.views(ours).items():
        tensor = source.folder.read(name)
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise UserError(
                f"{source.folder.path}: {short(name)} has NaN or infinite values; no run can use it"
            )
        view.copy_(tensor.view(view.shape))
    return ours


def _dtype(source: Source, rule: BlockMapping) -> torch.dtype:
    return source.folder.tensors[rule.sources[0]].dtype


def _meta(source: Source, config: Json, precision: str) -> Json:
    counts = dict.fromkeys(("step", "samples", "micro_batches", "skipped_steps", "tokens"), 0)
    return {
        "format": FORMAT,
        **counts,
        **one_rank(precision),
        "vocabulary": source.vocab_size,
        "config": config,
    }


def _sections(source: Source, tokenizer: str | None) -> Json:
    """Return the sections of the configuration of a checkpoint that no data has trained yet."""
    data: Json = {"mock": True, "sequence_length": source.config.data.sequence_length}
    if tokenizer is not None:
        data["tokenizer"] = tokenizer
    model = {**source.tree["model"], "vocab_multiple": math.gcd(source.vocab_size, VOCABULARY_MULTIPLE)}
    return {"data": data, "model": model, "moe": source.tree["moe"]}


def _length(given: Json, config: RunConfig) -> int:
    longest = given.get("max_position_embeddings")
    if type(longest) is not int or longest <= 0:
        return LONGEST
    return longest if config.model.position == "learned" else min(longest, LONGEST)


def _run_yaml(source: Source, folder: Path, run: Path, tokenizer: str | None) -> str:
    sections = _sections(source, tokenizer)
    data = {name: value for name, value in sections.pop("data").items() if name != "mock"}
    tree = {
        "name": f"{run.name}_continued",
        "data": {"sources": [], **data},
        **sections,
        "checkpoint": {"init": {"path": str(run / CHECKPOINTS / STEP)}},
    }
    return (
        f"# Goes on from {folder} ({source.family.architecture}), read by tools/convert_hf.py.\n"
        f"# python pretrain_gpt_moe.py --config {run / RUN_YAML} data.sources=[PREFIX] optimizer.lr=...\n"
        f"{dump(tree)}"
    )


def _size(source: Source) -> str:
    count = sum(math.prod(rule.shape) for group in source.rules for rule in group)
    return f"{count:,} parameters, {dtype_name(source.folder.tensors)}"


def family_of(config: Json, where: Path) -> Family:
    """Return the class that a config.json names.

    Raises:
        UserError: if it cannot be converted; the message names those that can.
    """
    found = config.get("model_type")
    if found == FAMILY.model_type:
        return family_of_folder(config, where)
    if not isinstance(found, str) or found not in FAMILIES:
        raise UserError(
            f"{where}: model_type: found {short(str(found))}, expected one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[found]


def open_source(path: Path) -> Source:
    """Open a folder and check that every tensor that its class has is there, and no other.

    Blocks of multi-token prediction are left out.

    Raises:
        UserError: naming the first file, key or tensor that is missing, damaged, unknown or of another shape.
    """
    folder = weights_of(Folder(path))
    family = family_of(folder.config, path / CONFIG)
    tree = family.read(folder.config, str(path / CONFIG))
    config = as_config(tree, str(path / CONFIG))
    config.data.sequence_length = _length(folder.config, config)
    rules = family.rules(config, int(config.model.vocab_size or 0))
    unused = _check_tensors(folder, family, config, rules)
    return Source(folder, family, tree, config, rules, unused)


def _check_tensors(
    folder: Weights, family: Family, config: RunConfig, groups: list[list[BlockMapping]]
) -> dict[str, list[str]]:
    """Check that the folder has the tensors of the rules; return those that are left out, by the reason."""
    expected: set[str] = set()
    for rule in flat(groups):
        for name, shape in rule.source_shapes().items():
            _check_tensor(folder, name, shape, family, rule.is_buffer)
            expected.add(name)
        dtypes = sorted({_name(folder.tensors[name].dtype) for name in rule.sources})
        if len(dtypes) > 1:
            raise UserError(
                f"{folder.path}: {short(rule.sources[0])} and the tensors that belong to it have dtypes "
                f"{' and '.join(dtypes)}, expected one"
            )
    further = None if family.left_out is None else family.left_out.format(n=config.model.num_layers)
    unused: dict[str, list[str]] = {}
    for name in sorted(folder.tensors.keys() - expected):
        if name == HF_HEAD and config.model.tie_embeddings:
            _check_copy(folder, name)
        elif INVERSE_FREQUENCIES.fullmatch(name):
            unused.setdefault("for they follow from the configuration", []).append(name)
        elif further is not None and name.startswith(further):
            unused.setdefault("for multi-token prediction is not read", []).append(name)
        else:
            raise UserError(
                f"{folder.path}: {short(name)} has no place in {family.architecture} as {CONFIG} describes it"
            )
    return unused


def _check_tensor(folder: Weights, name: str, shape: Shape, family: Family, is_buffer: bool) -> None:
    stored = folder.tensors.get(name)
    if stored is None:
        raise UserError(
            f"{folder.path}: {short(name)} is missing, which {family.architecture} has; expected shape "
            f"{list(shape)}"
        )
    if stored.shape != shape:
        raise UserError(
            f"{folder.path}: {short(name)} has shape {list(stored.shape)}, {CONFIG} says {list(shape)}"
        )
    if stored.dtype not in FLOATS and not is_buffer:
        raise UserError(
            f"{folder.path}: {short(name)} is {_name(stored.dtype)}, expected float32, bfloat16 or float16"
        )


def _check_copy(folder: Weights, name: str) -> None:
    """Check that a tensor is the same as the embedding, which the model has once: a tied weight."""
    same_shape = folder.tensors[name].shape == folder.tensors[HF_WORDS].shape
    if not same_shape or not torch.equal(folder.read(name), folder.read(HF_WORDS)):
        raise UserError(f"{folder.path}: {short(name)} is not {HF_WORDS}, of which it must be a copy")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
