"""The smallest model and run that have the kinds of blocks, parts and features of a given one."""

import copy
from collections.abc import Iterator
from typing import Any

from megamoe.apps.plan.figures import block_kinds, fewer_blocks, with_blocks
from megamoe.config import RunConfig, parse_config, to_dict
from megamoe.errors import UserError
from megamoe.train.resolved import examine

STEPS = 3
GLOBAL_BATCH = 4  # sequences; the data-parallel ranks of every layout divide them
Tree = dict[str, Any]
Changes = dict[str, Any]  # by dotted key
# What a few steps cannot show, what writes elsewhere, and what more than one rank in fp32 has.
CHANGED: Changes = {
    "overwrite": True,
    "data.workers": 0,
    "model.cpu_kernels": "plain",
    "model.keep_freed_memory": False,
    "parallel.precision": "fp32",
    "train.steps": STEPS,
    "train.micro_batch_size": 1,
    "train.global_batch_size": GLOBAL_BATCH,
    "evaluation.batches": 1,
    "log.report": False,
    "moe.router.replay": None,
}
SECTIONS = ("parallel", "evaluation", "checkpoint", "log")  # which have their defaults, as have these keys
KEYS: dict[str, tuple[str, ...]] = {
    # Megatron-Core's draws belong to the rank.
    "model": ("recompute", "fp8", "fp8_format", "fp8_amax_history", "hidden_dropout", "attention_dropout"),
    "optimizer": ("warmup_steps", "warmup_share", "decay_steps", "wsd_decay_steps", "moments"),
    "train": ("epochs", "tokens", "batch_rampup", "in_flight", "exit_after_steps", "exit_after_minutes"),
}
MOCK: Changes = {
    "data.mock": True,
    "data.sources": [],
    "data.sampling_exponent": None,
    "data.validation": {},
    "data.split": [0.5, 0.5, 0.0],
    "data.tokenizer": None,
    "model.vocab_size": 64,
}


def shrunk(config: RunConfig, prepared: Changes | None = None) -> tuple[Tree, list[str]]:
    """Return the tree of a small run on one rank, and a line for each thing that it has smaller.

    Every change is the smallest of its kind that the checks of a configuration accept. prepared: the keys of
    small data for an objective that mock tokens do not fit.

    Raises:
        UserError: if the run itself is refused.
    """
    lines: list[str] = []
    tree = on_one_rank(to_dict(config))
    if config.model.hidden_dropout or config.model.attention_dropout:
        lines.append("dropout: off in the blocks, where each rank draws by itself")
    kinds_of_data = ((MOCK, "mock tokens of a vocabulary of 64"), (prepared or {}, "short texts of its kind"))
    for data, line in kinds_of_data:
        if data and not problems(changed(tree, data), 1):
            tree = changed(tree, data)
            lines.append(f"data: {line}")
            break
    if refused := problems(tree, 1):
        raise UserError(f"the run on one rank is refused: {refused[0]}")
    tree, blocks = _few_blocks(tree)
    lines += blocks
    for what, choices in _choices(tree):
        for changes in choices:
            smaller = changed(tree, changes)
            if smaller == tree:
                break
            if not problems(smaller, 1):
                tree = smaller
                lines.append(f"{what}: " + ", ".join(f"{key} {value}" for key, value in changes.items()))
                break
    return tree, lines


def on_one_rank(tree: Tree) -> Tree:
    """Return a run as a few steps in fp32 on one rank."""
    defaults = to_dict(parse_config({}))
    tree = {**tree, **{name: defaults[name] for name in ("name", "differences", *SECTIONS)}}
    for section, keys in KEYS.items():
        tree[section] = {**tree[section], **{key: defaults[section][key] for key in keys}}
    return changed(tree, CHANGED)


def changed(tree: Tree, changes: Changes) -> Tree:
    """Return a copy with the values of dotted keys replaced."""
    tree = copy.deepcopy(tree)
    for dotted, value in changes.items():
        section, _, key = dotted.rpartition(".")
        (value_at(tree, section) if section else tree)[key] = value
    return tree


def value_at(tree: Tree, dotted: str) -> Any:
    """Return the value of a dotted key."""
    node: Any = tree
    for section in dotted.split("."):
        node = node[int(section) if isinstance(node, list) else section]
    return node


def problems(tree: Tree, ranks: int) -> list[str]:
    """Return why a run on so many ranks is refused; nothing if it is not."""
    try:
        config = parse_config(tree)
    except UserError as error:
        return [str(error)]
    return [str(problem) for problem in examine(config, ranks)[0]]


def _few_blocks(tree: Tree) -> tuple[Tree, list[str]]:
    """Keep a block of each kind, and at least four, which stages and their parts need."""
    config = parse_config(tree)
    every = block_kinds(config)
    blocks = fewer_blocks(config)[0][1]
    blocks += [block for block in range(len(every)) if block not in blocks][: max(0, 4 - len(blocks))]
    if len(blocks) == len(every):
        return tree, []
    smaller = to_dict(with_blocks(config, sorted(blocks)))
    if problems(smaller, 1):
        return tree, []
    return smaller, [f"blocks: {len(blocks)} of {len(every)}, every kind among them"]


def _choices(tree: Tree) -> Iterator[tuple[str, list[Changes]]]:
    """Yield what may be smaller, with the changes to try, the smallest first."""
    model = tree["model"]
    yield "width", [_width(model, size) for size in (32, 64, 128, 256)]
    if model["mup"] is None and model["init_scale"] is None:
        yield "weights", [{"model.init_std": 0.1}]  # as wide as the narrow model needs for clear choices
    if model["attention"]["window"] is not None:
        yield "window", [{"model.attention.window": 8}]
    yield "sequence", [{"data.sequence_length": length} for length in (16, 32, 64, 128, 256)]
    for key in ["moe", *(f"moe.groups.{number}" for number in range(len(tree["moe"]["groups"])))]:
        section = value_at(tree, key)
        sizes: Changes = {f"{key}.expert_ffn_hidden_size": 32}
        for name, size in (("latent_size", 16), ("shared_expert_ffn_hidden_size", 32)):
            if section[name] is not None:
                sizes[f"{key}.{name}"] = size
        yield f"experts of {key}", [sizes]
        counts = (8, 16, 32, 64, 128)
        yield f"experts of {key}", [{f"{key}.num_experts": n} for n in counts if n < section["num_experts"]]


def _width(model: Tree, size: int) -> Changes:
    heads, groups = model["num_attention_heads"], model["num_query_groups"]
    width: Changes = {
        "model.hidden_size": size,
        "model.num_attention_heads": 4,
        "model.num_query_groups": {None: None, heads: 4, 1: 1}.get(groups, 2),
        "model.ffn_hidden_size": 2 * size,
    }
    if model["head_size"] is not None:
        width["model.head_size"] = size // 4
    if model["latent"] is not None:
        ranks = {"key_value_rank": size // 2, "nope_size": 8, "rope_size": 4, "value_size": 8}
        width |= {f"model.latent.{key}": value for key, value in ranks.items()}
        if model["latent"]["query_rank"] is not None:
            width["model.latent.query_rank"] = size // 2
    if model["mup"] is not None:
        width["model.mup.base"] = size // 2
    return width
