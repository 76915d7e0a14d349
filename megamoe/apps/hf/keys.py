"""The keys of a class's config.json, and the keys of our configuration that mean the same.

Each entry of a class's table reads one or a few keys and returns keys of ours, and writes them from a
configuration of ours. A key that no entry knows is an error, unless it is known to be irrelevant here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megamoe.config import RunConfig
from megamoe.config.shapes import (
    expert_ffn_size,
    ffn_size,
    has_input_bias,
    has_output_bias,
    head_size,
    shared_ffn_size,
)
from megamoe.errors import printable

Json = dict[str, Any]
NUM_FURTHER = "num_nextn_predict_layers"  # blocks of multi-token prediction
REQUIRED = object()  # as a default: the key must be given
ABSENT = object()  # as a value: the key is left out
# Keys that other programs leave in a config.json, without meaning for the function; an import tells of them.
OF_OTHERS = frozenset(
    {"_attn_implementation_autoset", "_commit_hash", "tokenizer_class", "unsloth_fixed", "unsloth_version"}
)
# Keys that say nothing about the function that the model computes, or nothing to us.
IRRELEVANT = OF_OTHERS | frozenset(
    {
        *("architectures", "attention_dropout", "auto_map", "bos_token_id", "chunk_size_feed_forward"),
        *("decoder_start_token_id", "dtype", "embd_pdrop", "ep_size", "eos_token_id", "finetuning_task"),
        *("id2label", "initializer_range", "label2id", "max_position_embeddings", "model_type"),
        *("_name_or_path", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop", "return_dict", "sep_token_id"),
        *("task_specific_params", "torch_dtype", "torchscript", "transformers_version", "use_cache"),
    }
)


@dataclass(frozen=True)
class Entry:
    """One or a few keys of config.json.

    defaults: the value of each key that is not given; REQUIRED: it must be. read: from their values by name
    to keys of ours, dotted; raises ValueError for a value that has no counterpart. write: the reverse.
    aliases: another name of a key. released: as of `Family`.
    """

    defaults: Mapping[str, Any]
    read: Callable[[Json], Json]
    write: Callable[[RunConfig], Json]
    aliases: Mapping[str, str] = field(default_factory=dict)
    released: Mapping[str, Any] = field(default_factory=dict)


# Keys whose default follows from others.
OF_ATTENTION: dict[str, Callable[[RunConfig], Any]] = {
    "model.num_query_groups": lambda config: (
        config.model.num_query_groups or config.model.num_attention_heads
    ),
    "model.head_size": lambda config: head_size(config.model),
    "model.attention.input_bias": lambda config: has_input_bias(config.model),
    "model.attention.output_bias": lambda config: has_output_bias(config.model),
    "model.attention.scale": lambda config: config.model.attention.scale or head_size(config.model) ** -0.5,
}
FILLED_IN: dict[str, Callable[[RunConfig], Any]] = {
    **OF_ATTENTION,
    "model.ffn_hidden_size": lambda config: ffn_size(config.model),
    "moe.expert_ffn_hidden_size": expert_ffn_size,
    "moe.shared_expert_ffn_hidden_size": lambda config: shared_ffn_size(config.moe, expert_ffn_size(config)),
}


def value_of(config: RunConfig, dotted: str) -> Any:
    """Return the value of a key of ours; an option of a part stands under `options`.

    A default that follows from other keys is filled in.
    """
    found: Any = config
    for word in dotted.split("."):
        found = getattr(found, word) if hasattr(found, word) else getattr(found.options, word)
    return FILLED_IN[dotted](config) if found is None and dotted in FILLED_IN else found


def same(name: str, ours: str, default: Any = REQUIRED, alias: str | None = None) -> Entry:
    """A key that has the same value here."""
    return Entry(
        {name: default},
        lambda given: {ours: given[name]},
        lambda config: {name: value_of(config, ours)},
        {alias: name} if alias else {},
    )


def mapped(name: str, ours: str, values: Sequence[tuple[Any, Any]], default: Any = REQUIRED) -> Entry:
    """A key whose values have other names here; values: (theirs, ours) each."""

    def read(given: Json) -> Json:
        found = [mine for theirs, mine in values if equal(theirs, given[name])]
        if not found:
            raise unsupported(name, given[name], [theirs for theirs, _ in values])
        return {ours: found[0]}

    def write(config: RunConfig) -> Json:
        mine = value_of(config, ours)
        return {name: next((theirs for theirs, own in values if equal(own, mine)), values[0][0])}

    return Entry({name: default}, read, write)


def converted(
    name: str, ours: str, default: Any, *, read: Callable[[Any], Any], write: Callable[[RunConfig], Any]
) -> Entry:
    """A key whose value follows from another here: `read` turns theirs into ours, `write` gives theirs."""
    return Entry(
        {name: default}, lambda given: {ours: read(given[name])}, lambda config: {name: write(config)}
    )


def only(name: str, *values: Any, default: Any = None, written: bool = True) -> Entry:
    """A key whose other values have no counterpart here; a new config.json gets the first, if `written`."""

    def read(given: Json) -> Json:
        if not any(equal(value, given[name]) for value in values):
            raise unsupported(name, given[name], values)
        return {}

    return Entry({name: default}, read, lambda config: {name: values[0]} if written else {})


def constant(name: str, *values: Any) -> Entry:
    """A key of released folders whose other values have no counterpart here; transformers fills it in."""
    return replace(only(name, *values, default=values[0], written=False), released={name: values[0]})


def fixed(**ours: Any) -> Entry:
    """Keys of ours that every model of the class has; two underscores stand for a dot."""
    values = {name.replace("__", "."): value for name, value in ours.items()}
    return Entry({}, lambda given: dict(values), lambda config: {})


def ignored(*names: str) -> Entry:
    """Keys of the class that change nothing here."""
    return Entry(dict.fromkeys(names), lambda given: {}, lambda config: {})


def unsupported(name: str, value: Any, values: Sequence[Any]) -> ValueError:
    """Return the error for a value that has no counterpart."""
    expected = " or ".join("null" if each is None else str(each).lower() for each in values)
    return ValueError(f"{name}: found {printable(value, 60)}, expected {expected}")


def equal(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON value: 1 and 1.0 are, 1 and true are not."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
