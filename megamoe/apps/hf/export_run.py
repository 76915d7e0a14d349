"""From a checkpoint of ours, saved at any layout, to a Hugging Face folder.

The class is the one that computes the same function. The keys of config.json that say nothing of the function
(token ids, the longest sequence, ...), the generation's configuration and the tokenizer come from the folder
that the model was imported from, if it was; otherwise from the configuration.
"""

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megamoe.apps.checkpoints.stream import Stored, new_tree, tensor_writer
from megamoe.apps.checkpoints.verify import refuse_damaged
from megamoe.apps.hf.chat_files import chat_of
from megamoe.apps.hf.custom.export import CUSTOM, FAMILY, OF_ROUTERS, custom_family, custom_files
from megamoe.apps.hf.families import FAMILIES
from megamoe.apps.hf.families.common import WORDS
from megamoe.apps.hf.family import Family, as_config, differences, without_groups
from megamoe.apps.hf.folder import (
    CONFIG,
    GENERATION,
    SENTENCEPIECE,
    SPECIAL_IDS,
    TOKENIZER,
    TOKENIZER_FILES,
    WEIGHT_MAP,
    WEIGHTS,
    WEIGHTS_INDEX,
    dtype_name,
    portable,
    read_object,
    read_other_files,
    short,
    special_ids,
    tokenizer_files,
)
from megamoe.apps.hf.keys import Json
from megamoe.apps.hf.rules import BlockMapping, flat
from megamoe.checkpoint.format.files import parse_json
from megamoe.checkpoint.format.folder import candidates, find_checkpoints, kept_folder
from megamoe.checkpoint.format.reader import WEIGHT, CheckpointReader
from megamoe.config import RunConfig
from megamoe.config.load import configure
from megamoe.config.mup import without_mup
from megamoe.errors import UserError
from megamoe.registry import list_parts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The state of losses, and multi-token prediction.
OF_TRAINING = re.compile(rf"{OF_ROUTERS.pattern}|prediction\..*")
METADATA = {"format": "pt"}  # transformers asks for it
SHOWN_KEYS = 5


@dataclass(frozen=True)
class Target:
    """What is to be written.

    like: the config.json whose keys are kept. others: further files by name. ids: those of special tokens.
    remarks: lines for the user.
    """

    family: Family
    config: RunConfig
    rules: list[BlockMapping]
    like: Json
    others: dict[str, bytes]
    ids: Json
    remarks: list[str]


def export_run(
    path: Path,
    folder: Path,
    *,
    model_class: str | None = None,
    like: Path | None = None,
    dtype: str | None = None,
    shard_bytes: int = 5_000_000_000,
    overrides: Sequence[str] = (),
    report: Callable[[str], None] = print,
) -> None:
    """Write a Hugging Face folder from a checkpoint, or from the newest one of a run, whole or not at all.

    model_class: a model_type; default: the one of `like`, or the first that fits. like: a folder whose
    config.json, generation_config.json and tokenizer are kept; default: that of the import. dtype: a key of
    DTYPES for the parameters; default: as saved. shard_bytes: bytes of tensors in a file.

    Raises:
        UserError: if the checkpoint is damaged, `folder` exists, or no class fits; the message names the keys
            that stand in the way.
    """
    checkpoint = _checkpoint(path)
    refuse_damaged(checkpoint)
    with CheckpointReader(checkpoint, "checkpoint") as reader, new_tree(folder, checkpoint) as temporary:
        target = _target(reader, like, model_class, overrides)
        stored, unused = _stored(reader, target, dtype)
        _write_tensors(temporary, reader, target, stored, shard_bytes)
        content = _config(target, stored)
        for name, text in {**target.others, CONFIG: (json.dumps(content, indent=2) + "\n").encode()}.items():
            (temporary / name).write_bytes(text)
    if unused:
        first = short(unused[0])
        report(f"left out, for only training needs them: {len(unused)} tensors, the first of them {first}")
    if not target.others.keys() & set(TOKENIZER_FILES):
        report(f"{folder}: without a tokenizer, whose files are not known; name a folder with --like")
    for remark in target.remarks:
        report(f"{folder}: {remark}")
    if SENTENCEPIECE in target.others and TOKENIZER not in target.others:
        report(
            f"{folder / SENTENCEPIECE}: read it with sentencepiece; transformers may give other ids, for it "
            "takes every such model for BPE"
        )
    report(f"{folder}: {target.family.architecture}, {len(stored)} tensors, {dtype_name(stored)}")


def _checkpoint(path: Path) -> Path:
    found, is_run = find_checkpoints(path)
    newest = candidates(found[0].parent) if is_run else []
    return (newest or found)[0]


def _target(
    reader: CheckpointReader, like: Path | None, model_class: str | None, overrides: Sequence[str]
) -> Target:
    config = without_groups(reader.path, _configuration(reader, overrides))
    if model_class is not None and model_class not in (CUSTOM, *FAMILIES):
        known = ", ".join((*FAMILIES, CUSTOM))
        raise UserError(f"--class: found {short(model_class)}, expected one of {known}")
    kept = like or kept_folder(reader.path, reader.meta["config"])
    if like is not None and not like.is_dir():
        raise UserError(f"--like: {like} is no folder; name one with a tokenizer or a {CONFIG}")
    given = portable(read_object(kept / CONFIG)) if kept is not None and (kept / CONFIG).exists() else {}
    is_custom = (model_class or given.get("model_type")) in (CUSTOM, FAMILY.model_type)
    if is_custom:
        family = custom_family(reader.path, config, reader)
    else:
        family = _family(reader.path, config, model_class, FAMILIES.get(str(given.get("model_type"))))
    vocab_size = reader.shape(f"{WEIGHT}{WORDS}")[0]
    same_class = not is_custom and given.get("model_type") == family.model_type
    ids = special_ids(config) | {name: given[name] for name in SPECIAL_IDS if name in given}
    custom = custom_files() if is_custom else {}
    others, remarks = _other_files(reader, config, kept, custom, ids)
    rules = flat(family.rules(config, vocab_size))
    return Target(family, config, rules, given if same_class else {}, others, ids, remarks)


def _other_files(
    reader: CheckpointReader, config: RunConfig, kept: Path | None, custom: dict[str, bytes], ids: Json
) -> tuple[dict[str, bytes], list[str]]:
    """Return the generation's configuration, the tokenizer's files and those of our class by name; remarks.

    A run that was tuned on conversations has its own chat template, and also ends at the end of a turn.
    """
    tokenizer = read_other_files(kept) if kept is not None else tokenizer_files(config)
    content = tokenizer.pop(GENERATION, None)
    generation: Json = {**ids, **(parse_json(content) if content else {})}
    generation |= parse_json(custom[GENERATION]) if GENERATION in custom else {}
    remarks: list[str] = []
    try:
        chat = chat_of(reader.meta["config"], config)
    except UserError as error:
        chat, remarks = None, [f"without its chat template and the end of a turn: {error}"]
    if chat is not None:
        tokenizer, generation = chat.files(tokenizer), chat.ends(generation)
        for text in chat.end_texts:
            remarks.append(
                f"an answer ends with the text {text!r}, which is no token: pass it as stop_strings"
            )
    if content is None or custom or chat is not None:
        content = (json.dumps(generation, indent=2) + "\n").encode()
    return {**tokenizer, **custom, GENERATION: content}, remarks


def _configuration(reader: CheckpointReader, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration that a checkpoint holds; no plugin is run."""
    tree = {section: reader.meta["config"].get(section, {}) for section in ("data", "model", "moe")}
    router = {key: value for key, value in tree["moe"].get("router", {}).items() if key != "replay"}
    moe = copy.deepcopy({**tree["moe"], "router": router})
    tree["moe"] = _without_own_losses(moe)
    config = configure(tree, list(overrides), source=str(reader.path))
    if config.model.architecture != "decoder":
        raise UserError(
            f"{reader.path}: model.architecture: {config.model.architecture}; only decoders can be exported"
        )
    return replace(config, model=without_mup(config.model))


def _without_own_losses(moe: Json) -> Json:
    """Return the section `moe` of a checkpoint without losses of plugins, which are for training alone."""
    known = list_parts("loss")
    for layer in (moe, *(group for group in moe.get("groups") or [] if isinstance(group, dict))):
        if isinstance(losses := layer.get("losses"), dict):
            layer["losses"] = {key: each for key, each in losses.items() if each.get("name") in known}
    return moe


def _family(path: Path, config: RunConfig, named: str | None, like: Family | None) -> Family:
    """Return the class that computes the same function.

    Raises:
        UserError: naming the keys that stand in the way of the named class, or of the nearest one.
    """
    tried = [FAMILIES[named]] if named else [*([like] if like else []), *FAMILIES.values()]
    problems: dict[str, list[str]] = {}
    for family in tried:
        found = _obstacles(family, config)
        if not found:
            return family
        problems[family.model_type] = found
    nearest = min(problems, key=lambda name: (problems[name][0].startswith(CONFIG), len(problems[name])))
    obstacles = problems[nearest]
    more = f" and {len(obstacles) - SHOWN_KEYS} more" if len(obstacles) > SHOWN_KEYS else ""
    which = f"--class {nearest}" if named else f"no class fits; the nearest, {nearest}"
    raise UserError(
        f"{path}: {which}: it cannot express {', '.join(obstacles[:SHOWN_KEYS])}{more}; name another "
        f"--class, such as {CUSTOM}, or override keys that do not matter to you"
    )


def _obstacles(family: Family, config: RunConfig) -> list[str]:
    """Return the keys of ours, with their values, that a class cannot express."""
    try:
        there = as_config(family.read(family.write(config)))
    except UserError as error:
        return [str(error)]
    return [f"{key} {short(str(mine))}" for key, (mine, _) in differences(config, there).items()]


def _stored(
    reader: CheckpointReader, target: Target, dtype: str | None
) -> tuple[dict[str, Stored], list[str]]:
    """Return every tensor of the folder to be written, and the weights that only training needs.

    Raises:
        UserError: naming a tensor that is missing, of another shape, or left over.
    """
    left = {name.removeprefix(WEIGHT) for name in reader.names(WEIGHT)}
    stored: dict[str, Stored] = {}
    for rule in target.rules:
        if rule.target not in left:
            raise UserError(f"{reader.path}: {short(rule.target)} is missing; name another checkpoint")
        left.discard(rule.target)
        name = WEIGHT + rule.target
        if tuple(reader.shape(name)) != rule.shape:
            raise UserError(
                f"{reader.path}: {short(rule.target)} has shape {reader.shape(name)}, its configuration says "
                f"{list(rule.shape)}"
            )
        saved = reader.dtype(name)
        kind = saved if dtype is None or rule.is_buffer else DTYPES[dtype]
        stored |= {source: Stored(kind, shape) for source, shape in rule.source_shapes().items()}
    unused = sorted(name for name in left if OF_TRAINING.fullmatch(name))
    left -= set(unused)
    if left:
        raise UserError(
            f"{reader.path}: {short(min(left))} has no place in {target.family.architecture}; name another "
            "--class"
        )
    return stored, unused


@torch.no_grad()
def _write_tensors(
    folder: Path, reader: CheckpointReader, target: Target, stored: dict[str, Stored], shard_bytes: int
) -> None:
    """Write the files one after the other; a tensor of ours that lies in two of them is read twice."""
    shards = _shards(stored, shard_bytes)
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else [WEIGHTS]
    for name, shard in zip(names, shards, strict=True):
        with tensor_writer(folder / name, {each: stored[each] for each in shard}, METADATA) as write:
            for rule in target.rules:
                if shard.isdisjoint(rule.sources):
                    continue
                ours = reader.tensor(WEIGHT + rule.target)
                reader.close()  # mapped files count as memory
                for source, (view, shape) in rule.views(ours).items():
                    if source in shard:
                        write(source, view.to(stored[source].dtype).reshape(shape))
    if count > 1:
        total = sum(each.num_bytes for each in stored.values())
        where = {each: name for name, shard in zip(names, shards, strict=True) for each in shard}
        index = {"metadata": {"total_size": total}, WEIGHT_MAP: dict(sorted(where.items()))}
        (folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(stored: dict[str, Stored], shard_bytes: int) -> list[set[str]]:
    """Divide the tensors, in their order, into files of at most so many bytes, or of one tensor."""
    shards: list[set[str]] = [set()]
    size = 0
    for name, each in stored.items():
        if shards[-1] and size + each.num_bytes > shard_bytes:
            shards.append(set())
            size = 0
        shards[-1].add(name)
        size += each.num_bytes
    return shards


def _config(target: Target, stored: dict[str, Stored]) -> Json:
    """Return config.json: where the kept one says the same as the configuration, it with keys for others."""
    like, family = target.like, target.family
    vocab_size = next(iter(stored.values())).shape[0]
    others = family.for_others(target.config, like)
    dtype = {"torch_dtype" if "torch_dtype" in like else "dtype": dtype_name(stored)}
    if (
        like
        and like.get("vocab_size") == vocab_size
        and not differences(target.config, as_config(family.read(like)))
    ):
        return {**others, **like, **dtype}
    longest = {"max_position_embeddings": target.config.data.sequence_length}
    written = {**family.write(target.config), "vocab_size": vocab_size, **dtype}
    known = {name: value for name, value in like.items() if name in KEPT_KEYS}
    return {**longest, **target.ids, **others, **known, **written}


KEPT_KEYS = (
    *("attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "max_position_embeddings"),
    *("pad_token_id", "use_cache"),
)
