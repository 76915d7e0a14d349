"""A class of transformers: its keys, its tensors, and what both say of our configuration."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megamoe.apps.hf.folder import CONFIG, short
from megamoe.apps.hf.keys import ABSENT, IRRELEVANT, OF_ATTENTION, REQUIRED, Entry, Json
from megamoe.apps.hf.rules import BlockMapping, TensorMapping, expand
from megamoe.config import RunConfig, parse_config, to_dict
from megamoe.config.layer_kinds import kinds
from megamoe.config.model_schema import LatentConfig
from megamoe.config.shapes import (
    expert_activation,
    expert_ffn_size,
    ffn_size,
    has_input_bias,
    has_output_bias,
    head_size,
    inserted_after,
    key_size,
    moe_block_numbers,
    query_size,
    shared_ffn_size,
    window_of,
)
from megamoe.errors import UserError

# Keys that change how a model is trained or computed, and not what it computes once it is trained.
OF_TRAINING = frozenset(
    {
        *("model.architecture", "model.init_std", "model.init_scale", "model.hidden_dropout"),
        *("model.attention_dropout", "model.recompute", "model.backend", "model.norm_kernel"),
        *("model.cpu_kernels", "model.gpu_kernels", "model.keep_freed_memory", "model.fp8"),
        *("model.fp8_format", "model.fp8_amax_history", "model.vocab_size", "model.vocab_multiple"),
        *("model.multi_token_prediction", "moe.losses", "moe.frozen", "moe.expert_output_dropout"),
        *("moe.expert_activation_dropout", "moe.weights_in_activation", "moe.router.scorer.jitter"),
        *("moe.router.scorer.rows", "moe.router.selector.second", "moe.router.selector.renormalise"),
        *("moe.router.score_function.bias_update", "moe.router.score_function.bias_until"),
        *("moe.router.score_function.mean_experts", "moe.router.replay"),
    }
)
# Keys for which `function_of` has others, or which it fills in only where they matter.
REPLACED = frozenset(
    {
        *("model.attention.window_blocks", "model.ffn_hidden_size", "moe.expert_ffn_hidden_size"),
        *("moe.shared_expert_ffn_hidden_size", "moe.num_shared_experts", "moe.shared_expert_mode"),
        *("moe.expert_activation", "moe.layers"),
    }
)


@dataclass(frozen=True)
class Family:
    """A class: `model_type` and `architecture` of its config.json, its keys and its table of tensors.

    left_out: the beginning of the names of tensors that are for multi-token prediction; {n}: the number of
    blocks. released: the keys of released folders that `keys` do not write,
    with their values, or functions of the configuration. transformers fills them in by itself, and other
    programs read them.
    """

    model_type: str
    architecture: str
    keys: tuple[Entry, ...]
    table: tuple[TensorMapping, ...]
    left_out: str | None = None
    released: Json = field(default_factory=dict)

    def read(self, given: Json, where: str = CONFIG) -> Json:
        """Return the keys of ours that a config.json says, as a tree with `model` and `moe`.

        Raises:
            UserError: naming a key that is missing, unknown, or has a value without counterpart here.
        """
        self._check_class(given, where)
        tree: Json = {}
        known = set(IRRELEVANT)
        for entry in self.keys:
            known |= entry.defaults.keys() | entry.aliases.keys()
            named = {entry.aliases.get(name, name): value for name, value in given.items()}
            values = {name: named.get(name, default) for name, default in entry.defaults.items()}
            missing = [name for name, value in values.items() if value is REQUIRED]
            if missing:
                raise UserError(f"{where}: {missing[0]} is missing; download the folder again")
            try:
                found = entry.read(values)
            except ValueError as error:
                raise UserError(
                    f"{where}: {error}; {self.architecture} cannot be converted with it"
                ) from None
            except (TypeError, KeyError, AttributeError, ZeroDivisionError):
                names = ", ".join(f"{name} {short(str(value))}" for name, value in values.items())
                raise UserError(f"{where}: {names}: not the kind of value that it has") from None
            for dotted, value in found.items():
                _put(tree, dotted, value)
        unknown = sorted(given.keys() - known)
        if unknown:
            raise UserError(
                f"{where}: the key {short(unknown[0])} is not known for {self.architecture}, so its meaning "
                "would be lost; remove it if it has none"
            )
        selector = tree.get("moe", {}).get("router", {}).get("selector", {})
        if selector.get("k") == 1 and selector.get("weights") == "renormalised":
            _put(tree, "moe.frozen", ["router"])  # its weights are always 1: no gradient
        return tree

    def _check_class(self, given: Json, where: str) -> None:
        named = given.get("architectures") or [self.architecture]
        if named != [self.architecture]:
            raise UserError(
                f"{where}: architectures: found {short(str(named))}, expected {self.architecture} for "
                f"model_type {self.model_type}"
            )

    def write(self, config: RunConfig) -> Json:
        """Return a config.json that comes closest to a configuration; `differences` says how close."""
        content: Json = {"architectures": [self.architecture], "model_type": self.model_type}
        for entry in self.keys:
            with suppress(AttributeError):  # a part without this option, which `differences` names
                content |= entry.write(config)
        return content

    def for_others(self, config: RunConfig, like: Json) -> Json:
        """Return the keys of `released`, and those of a config.json, `like`, under the class's names."""
        aliases = {main: other for entry in self.keys for other, main in entry.aliases.items()}
        constants = {name: each for entry in self.keys for name, each in entry.released.items()}
        released = {**constants, **self.released}
        values = {name: value(config) if callable(value) else value for name, value in released.items()}
        values |= {main: like[other] for main, other in aliases.items() if other in like}
        return {name: value for name, value in values.items() if value is not ABSENT}

    def rules(self, config: RunConfig, num_words: int) -> list[list[BlockMapping]]:
        """Return the rules in groups: those that stand once, then those of each block."""
        moe_blocks = frozenset(number - 1 for number in moe_block_numbers(config))
        return expand(
            self.table, dims_of(config, num_words), facts_of(config), moe_blocks, config.model.num_layers
        )


def dims_of(config: RunConfig, num_words: int) -> dict[str, int]:
    """Return the sizes by letter, of which the tables' shapes are made.

    V: rows of the embedding. H: hidden. N: heads. G: groups of them. D: head size. Q, K: rows of all heads'
    queries, and of all groups' keys. F: dense FFN. E: experts. X: an expert's FFN. S: the FFN of all shared
    experts together.
    """
    model, moe = config.model, config.moe
    return {
        "V": num_words,
        "H": model.hidden_size,
        "N": model.num_attention_heads,
        "G": model.num_query_groups or model.num_attention_heads,
        "D": head_size(model),
        "Q": query_size(model),
        "K": key_size(model),
        "F": ffn_size(model),
        "E": moe.num_experts,
        "X": expert_ffn_size(config),
        "S": shared_ffn_size(moe, expert_ffn_size(config)),
        **(latent_dims(model.num_attention_heads, model.latent) if model.latent else {}),
    }


def latent_dims(heads: int, latent: LatentConfig) -> dict[str, int]:
    """Return the sizes of latent attention by letter.

    Q: rows of all heads' queries. A, C: ranks of the compressed queries, and of the keys and values. R:
    columns that rotate. U: rows of all heads' keys that do not rotate, and values. O: rows of all heads'
    values.
    """
    return {
        "Q": heads * (latent.nope_size + latent.rope_size),
        "A": latent.query_rank or 0,
        "C": latent.key_value_rank,
        "R": latent.rope_size,
        "U": heads * (latent.nope_size + latent.value_size),
        "O": heads * latent.value_size,
    }


def facts_of(config: RunConfig) -> frozenset[str]:
    """Return the facts that a line of a table may need."""
    norm = config.model.attention.query_key_norm
    latent = config.model.latent
    facts = {
        "latent queries": latent is not None and latent.query_rank is not None,
        "whole queries": latent is not None and latent.query_rank is None,
        "head norms": norm == "head",
        "whole norms": norm == "whole",
        "input bias": has_input_bias(config.model),
        "output bias": has_output_bias(config.model),
        "untied": not config.model.tie_embeddings,
        "shared": config.moe.num_shared_experts > 0,
        "biased": getattr(config.moe.router.score_function.options, "bias_update", 0) > 0,
    }
    return frozenset(name for name, holds in facts.items() if holds)


def function_of(config: RunConfig) -> Json:
    """Return the keys that decide what a trained model computes, by dotted name, with defaults filled in."""
    tree = to_dict(config)
    flat = dict(_flat({"model": tree["model"], "moe": tree["moe"]}, ""))
    if flat.get("moe.router.selector.weights") == "kept_softmax":  # the same function, see `top_k`
        flat["moe.router.selector.weights"] = "renormalised"
    if not config.moe.router.masks and "moe.router.score_function.over" in flat:
        flat["moe.router.score_function.over"] = "candidates"  # which are all experts
    if config.model.latent is not None:
        flat["model.latent.norm_eps"] = config.model.latent.norm_eps or config.model.norm_eps
    blocks = [block for block in moe_block_numbers(config) if block <= config.model.num_layers]
    found = {
        name: value
        for name, value in flat.items()
        if not any(name == key or name.startswith(f"{key}.") for key in OF_TRAINING | REPLACED)
        and (blocks or not name.startswith("moe."))
    }
    model = config.model
    found |= {
        **{name: filled_in(config) for name, filled_in in OF_ATTENTION.items()},
        "model.attention.window": [window_of(model, block + 1) for block in range(model.num_layers)],
        "moe.layers.at": blocks,
        "moe.layers.insert_after": inserted_after(config),
    }
    if len(blocks) < model.num_layers:
        found["model.ffn_hidden_size"] = ffn_size(model)
    if blocks:
        found["moe.expert_ffn_hidden_size"] = expert_ffn_size(config)
        shared = shared_ffn_size(config.moe, expert_ffn_size(config))
        found["moe.shared_expert_ffn_hidden_size"] = shared
        found["moe.shared_expert_mode"] = config.moe.shared_expert_mode if shared else None
        found["moe.expert_activation"] = expert_activation(config)
        found["moe.router.score_function.bias_update"] = "biased" in facts_of(config)
    return found


def without_groups(path: Path, config: RunConfig) -> RunConfig:
    """Return the configuration without `moe.groups`, if its groups differ in training alone.

    Raises:
        UserError: naming a key in which two layers differ: no class holds such a model.
    """
    if not config.moe.groups:
        return config
    first, *others = kinds(config)
    expected = function_of(first.config)
    for kind in others:
        found = function_of(kind.config)
        for key in sorted(expected.keys() | found.keys()):
            values = expected.get(key), found.get(key)
            if values[0] != values[1] and not key.startswith(("moe.layers", "model.")):
                one, other = (short(str(value)) for value in values)
                raise UserError(
                    f"{path}: moe.groups: {key} is {one} in block {first.layers[0]} and {other} in block "
                    f"{kind.layers[0]}; no class of Hugging Face that can be written holds layers that differ"
                )
    return replace(config, moe=replace(first.moe, layers=config.moe.layers))


def differences(config: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two configurations are not the same function, with both values."""
    one, two = function_of(config), function_of(other)
    names = sorted(one.keys() | two.keys())
    return {name: (one.get(name), two.get(name)) for name in names if one.get(name) != two.get(name)}


def as_config(tree: Json, where: str = CONFIG) -> RunConfig:
    """Return the configuration of a tree with `model` and `moe`; defaults elsewhere.

    Raises:
        UserError: if a value is none that the schema has.
    """
    return parse_config({section: tree.get(section, {}) for section in ("model", "moe")}, source=where)


def _flat(tree: Any, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [pair for name, value in tree.items() for pair in _flat(value, f"{prefix}.{name}".lstrip("."))]


def _put(tree: Json, dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[last] = value
