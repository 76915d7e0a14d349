"""Checks whether this run can resume from a checkpoint (same model and data, any layout) or start from its
weights.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from megamoe.checkpoint.format.files import META, damaged
from megamoe.checkpoint.format.meta import Index, Meta, read_index, read_meta
from megamoe.checkpoint.format.reader import WEIGHT
from megamoe.config import RunConfig, to_dict
from megamoe.config.layer_kinds import LayerKind, kinds
from megamoe.config.model_schema import ModelConfig, RotaryConfig
from megamoe.config.shapes import expert_activation, moe_layer_numbers, stacks
from megamoe.errors import UserError, printable
from megamoe.io import real
from megamoe.model.size import part_shapes
from megamoe.registry import plugin_digests

# What a resume does about a key that differs from the checkpoint's. The longest section that fits counts.
#   same      refuse: it decides the tensors' shapes, the model's function or which sample comes next
#   function  refuse, unless checkpoint.allow_changes: with the same weights the model computes something else
#   told      go on, and tell the old and the new value
#   launch    go on: it says what this launch does, not what the run is
RULES = {
    **dict.fromkeys(("name", "output", "overwrite", "differences", "log", "moe.router.replay"), "launch"),
    **{f"checkpoint.{key}": "launch" for key in ("resume", "allow_changes", "init", "remote")},
    **dict.fromkeys(("train.exit_after_steps", "train.exit_after_minutes", "train.profiler"), "launch"),
    **dict.fromkeys(("seed", "model", "moe", "train.objective"), "same"),
    **{f"data.{key}": "same" for key in ("sources", "sampling_exponent", "split", "order", "mock")},
    **dict.fromkeys(("data.sequence_length", "data.document_aware"), "same"),
    "moe.router": "function",
    **dict.fromkeys(("plugins", "data", "parallel", "optimizer", "train"), "told"),
    **dict.fromkeys(("evaluation", "checkpoint"), "told"),
    "moe.losses": "told",
    **{f"model.{key}": "told" for key in ("hidden_dropout", "attention_dropout", "multi_token_prediction")},
    **{f"moe.{key}": "told" for key in ("expert_output_dropout", "expert_activation_dropout")},
    "model.vocab_size": "launch",  # the vocabulary itself is compared
    # How it is computed, not what:
    **{f"model.{key}": "told" for key in ("recompute", "backend", "keep_freed_memory")},
    **{f"model.{key}": "told" for key in ("norm_kernel", "cpu_kernels", "gpu_kernels")},
    **{f"model.{key}": "told" for key in ("fp8", "fp8_format", "fp8_amax_history")},
}
SECTIONS = (("model",), ("data",), ("train",), ("moe", "router", "scorer"), ("moe", "losses"))
# Keys that change the model's function but no tensor's shape.
SAME_FUNCTION = (
    *("num_attention_heads", "position", "rope_base"),
    *(f"rotary.{field.name}" for field in fields(RotaryConfig)),
    *("latent", "norm", "norm_position", "norm_eps", "activation", "scale_embeddings", "embedding_scale"),
    *("residual_scale", "logit_scale", "logit_soft_cap", "mup"),
    *(f"attention.{key}" for key in ("query_key_norm", "window", "window_blocks", "soft_cap", "scale")),
)
NUMBERED = re.compile(r"^moe\.groups\.(\d+)")  # the beginning of a key as `_differences` gives it
OF_A_GROUP = re.compile(r"^moe\.groups\[\d+\]\.")
# In a tensor's name.
BLOCK = re.compile(r"\b(?:(encoder|decoder)\.layers\.(\d+)|prediction\.depths\.(\d+))\.")
PART_TENSOR = re.compile(r"\.((?:router|losses)\..+)$")  # the end of a tensor's name, from its part on
MTP = "multi_token_prediction"  # whose loss may get another weight
NEW_MOMENTS = (
    "changed since the checkpoint: another algorithm updates the matrices, whose momentum starts at 0; all "
    "other weights keep their moments"
)
RESUME_WAY_OUT = "resume with the configuration that saved it"
FUNCTION_WAY_OUT = (
    "the model would compute another function: resume with the configuration that saved it, or say "
    "checkpoint.allow_changes=true"
)
INIT_WAY_OUT = "start with the model's configuration that saved it"
Tree = dict[str, Any]


def check_resume(config: RunConfig, vocabulary: int, path: Path) -> list[str]:
    """Refuse a checkpoint that does not fit, before anything is built; return a line of each other change.

    Raises:
        UserError: naming the first key that differs and must not, both values, and the way out.
    """
    meta = read_meta(path)
    saved, current, defaults = _saved_config(path, meta), to_dict(config), to_dict(RunConfig())
    _same_architecture(path, saved, config, RESUME_WAY_OUT)
    _same(path, "vocabulary", meta["vocabulary"], vocabulary)
    groups = max(len(_groups(tree)) for tree in (saved, current))
    trees = _with_sections(saved), _with_sections(current), _with_default_groups(defaults, groups)
    found = _differences(*trees)
    changes = [(NUMBERED.sub(r"moe.groups[\1]", key), before, after) for key, before, after in found]
    for key, before, after in changes:
        if rule_of(key) == "same":
            _same(path, key, before, after)
    depths = [(tree["model"].get(MTP) or {}).get("depth", 0) for tree in (saved, current)]
    _same(path, f"model.{MTP}.depth", *depths)
    if moe_layer_numbers(config):
        known = _saved_part_shapes(config, read_index(path))
        for kind in kinds(config):
            now, then = part_shapes(kind.config, vocabulary), _section(saved, kind)
            for number in kind.layers:
                _same_state(path, kind, then, known.get(number, {}), now)
        for key, old, new in changes:
            if rule_of(key) == "function" and not config.checkpoint.allow_changes:
                _same(path, key, old, new, FUNCTION_WAY_OUT)
    shown = [(key, printable(before, 60), printable(after, 60)) for key, before, after in changes]
    names = [(tree.get("optimizer") or {}).get("name", "adamw") for tree in (saved, current)]
    return [
        f"changed since the checkpoint: {key} {before} -> {after}"
        for key, before, after in shown
        if rule_of(key) in ("told", "function")
    ] + [*[NEW_MOMENTS] * (names[0] != names[1] and "muon" in names), *changed_plugins(config, meta)]


def changed_plugins(config: RunConfig, meta: Meta) -> list[str]:
    """Return a line for each file of a plugin that is another one than when the checkpoint was saved.

    Of plugins that both have: `plugins` itself is a key. Checkpoints of earlier versions do not say.
    """
    saved, current = meta.get("plugins", {}), plugin_digests(config.plugins)
    both = {_plugin_of(name) for name in saved} & {_plugin_of(name) for name in current}
    lines = []
    for name in sorted(saved.keys() | current.keys()):
        if _plugin_of(name) in both and saved.get(name) != current.get(name):
            found = "removed" if name not in current else "another SHA-256" if name in saved else "new"
            lines.append(f"changed since the checkpoint: plugin {printable(name, 120)} ({found})")
    return lines


def _plugin_of(name: str) -> str:
    return name.partition(": ")[0]


def rule_of(key: str) -> str:
    """Return what a resume does about a key that differs, a value of `RULES`."""
    key = OF_A_GROUP.sub("moe.", key)
    while key and key not in RULES:
        key = key.rpartition(".")[0]
    return RULES[key]


def _differences(
    saved: Tree, current: Tree, defaults: Tree, prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key that differs, with both values; of a mapping, the keys below it.

    A key that is newer than the checkpoint had its default. Of two parts with different names, the names.
    """
    names = saved.get("name", defaults.get("name")), current.get("name")
    if prefix and names[0] != names[1]:
        yield prefix.rstrip("."), *names
        return
    for key in [*current, *(saved.keys() - current.keys())]:
        before, after = _given(saved.get(key, defaults.get(key))), _given(current.get(key))
        if isinstance(before, dict) and isinstance(after, dict):
            below = _given(defaults.get(key))
            known = below if isinstance(below, dict) else {}
            yield from _differences(before, after, known, f"{prefix}{key}.")
        elif before != after:
            yield f"{prefix}{key}", before, after


def _same_architecture(path: Path, saved: Tree, config: RunConfig, way_out: str) -> None:
    """Check the architecture first, from which other vocabularies and keys follow."""
    before = saved["model"].get("architecture", ModelConfig().architecture)
    _same(path, "model.architecture", before, config.model.architecture, way_out)


def _given(value: Any) -> Any:
    """Return a value without its keys that are null: an older checkpoint may lack them."""
    if not isinstance(value, dict):
        return value
    return {key: _given(each) for key, each in value.items() if each is not None}


def _saved_config(path: Path, meta: Meta) -> Tree:
    """Return the configuration in a checkpoint; the sections to be compared exist."""
    for keys in SECTIONS:
        node: Any = meta["config"]
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise damaged(path / META, f"config has no section {'.'.join(keys)}")
    return meta["config"]


def _groups(tree: Tree) -> list[Tree]:
    """Return the `moe.groups` of a configuration's mapping; older checkpoints have none."""
    return tree["moe"].get("groups") or []


def _with_sections(tree: Tree) -> Tree:
    """Return a configuration's mapping whose `moe.groups` is a mapping too, so that keys are compared."""
    return {**tree, "moe": {**tree["moe"], "groups": _numbered(_groups(tree))}}


def _with_default_groups(defaults: Tree, count: int) -> Tree:
    """Return the defaults with those of so many groups, which are those of `moe`."""
    return {**defaults, "moe": {**defaults["moe"], "groups": _numbered([defaults["moe"]] * count)}}


def _numbered(groups: list[Tree]) -> Tree:
    return {str(number): group for number, group in enumerate(groups)}


def _section(tree: Tree, kind: LayerKind) -> Tree:
    """Return the section of a kind of layers: its group, or `moe` where there is no such group."""
    found = re.fullmatch(r"moe\.groups\[(\d+)\]", kind.key)
    groups = _groups(tree)
    return groups[int(found[1])] if found and int(found[1]) < len(groups) else tree["moe"]


def _saved_part_shapes(config: RunConfig, index: Index) -> dict[int, dict[str, list[int]]]:
    """Return the saved shapes of the routers' and the losses' tensors, by block and name inside the layer."""
    first = {stack.name: stack.first for stack in stacks(config)}
    found: dict[int, dict[str, list[int]]] = {}
    for name, tensor in index["tensors"].items():
        match, block = PART_TENSOR.search(name), BLOCK.search(name)
        if match and block and name.startswith(WEIGHT) and (stack := block[1] or "prediction") in first:
            found.setdefault(first[stack] + int(block[2] or block[3]), {})[match[1]] = tensor["shape"]
    return found


def _same_state(
    path: Path, kind: LayerKind, saved: Tree, known: dict[str, list[int]], shapes: dict[str, list[int]]
) -> None:
    """Check that the saved state of a layer's router and losses exists here with the same meaning.

    saved: the section of its kind in the checkpoint. known: shapes of the parts' saved tensors by name.
    shapes: those of this run.
    """
    current = to_dict(kind.moe)
    scorers = [moe["router"]["scorer"].get("name") for moe in (saved, current)]
    _same(path, kind.place("moe.router.scorer"), *scorers)
    for name in sorted(known.keys() | shapes.keys()):
        if known.get(name) != shapes.get(name):
            section, part, _ = name.split(".", maxsplit=2)
            key = kind.place(f"moe.{section}.{part}")
            _same(path, key, saved[section].get(part), current[section].get(part))
            # Another part's option decides it.
            _same(path, kind.place(f"moe.{name}"), known.get(name), shapes.get(name))


def check_init(config: RunConfig, vocabulary: int, run_folder: Path) -> None:
    """Refuse initial weights (`checkpoint.init.path`) that would compute another function in this model.

    Raises:
        UserError: naming the first key that differs, or that the checkpoint is in this run's own folder.
    """
    init = config.checkpoint.init
    path = Path(str(init.path))
    if init.experts == "same" and (init.noise, init.router_scale) != (0, 1):
        raise UserError(
            f"checkpoint.init: noise {init.noise}, router_scale {init.router_scale}: are for experts made of "
            "a dense FFN; say checkpoint.init.experts=cut or copy, or leave them out"
        )
    meta = read_meta(path, "checkpoint.init.path")
    if real(path).is_relative_to(real(run_folder)):
        raise UserError(
            f"checkpoint.init.path: {path} lies in this run's own folder, which a new run empties; "
            "set name=... to another one, or go on with --resume"
        )
    saved_config = _saved_config(path, meta)
    _same_architecture(path, saved_config, config, INIT_WAY_OUT)
    _same(path, "vocabulary", meta["vocabulary"], vocabulary, INIT_WAY_OUT)
    # Reading the tensors checks their names and shapes, and so the sizes.
    saved, current = saved_config["model"], to_dict(config)["model"]
    defaults = to_dict(RunConfig())["model"]
    for key in SAME_FUNCTION:
        section, _, inner = key.partition(".")
        values = (saved.get(section, defaults[section]), current[section])
        before, after = (value.get(inner) for value in values) if inner else values
        _same(path, f"model.{key}", before, after, INIT_WAY_OUT)
    if moe_layer_numbers(config):
        # Experts made from a dense FFN use its activation.
        for kind in kinds(config):
            of_kind, key = _section(saved_config, kind), kind.place("moe.expert_activation")
            own = of_kind.get("expert_activation") if init.experts == "same" else None
            before = own or saved.get("activation")
            _same(path, key, before, expert_activation(kind.config), INIT_WAY_OUT)


def check_vocabulary(path: Path, meta: Meta, vocabulary: int) -> None:
    """Refuse data of another vocabulary than that of a checkpoint's model.

    Raises:
        UserError: naming both sizes.
    """
    _same(path, "vocabulary", meta["vocabulary"], vocabulary, "name data of the model's own vocabulary")


def _same(path: Path, key: str, before: Any, after: Any, way_out: str = RESUME_WAY_OUT) -> None:
    """Raise UserError if the values differ; of two mappings, name the first key below that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        if before.get("name") != after.get("name"):  # of two parts, whose other options do not compare
            before, after = before.get("name"), after.get("name")
        else:
            for inner in [*after, *(before.keys() - after.keys())]:
                _same(path, f"{key}.{inner}", before.get(inner), after.get(inner), way_out)
            return
    if before != after:
        found, now = printable(before, 60), printable(after, 60)
        raise UserError(f"{path}: saved with {key} {found}, this run has {now}; {way_out}")
