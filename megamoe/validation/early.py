"""What is wrong with a run, told within a second: nothing here imports torch, DeepSpeed or Megatron-Core.

It finds keys, types and values that do not fit the schema, names of parts that do not exist, sizes and
lengths that exclude each other, and files that are missing. Options of parts need the parts' modules, and
what a plugin may define needs the plugin: `megamoe.train.resolved.examine` checks them, and all else.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megamoe import registry
from megamoe.config import RunConfig
from megamoe.config.files import read_run
from megamoe.config.load import apply_override, parse_config
from megamoe.config.parts import DEFAULTS
from megamoe.data.card import LABELLED, check_files, is_pairs
from megamoe.errors import Problem, UserError
from megamoe.object_storage import check_folder, is_url
from megamoe.parallel.zero.deepspeed_config import read_deepspeed_config
from megamoe.validation.architecture import size_problems
from megamoe.validation.schedule import schedule_problems

# What a plugin may define, and what says how the schedule fits the steps.
OF_PLUGINS = ("plugins", "moe", "train.objective", "train.callbacks", "parallel.exchange")
OF_SCHEDULE = {f"optimizer{key}" for key in ("", ".warmup_steps", ".warmup_share", ".decay_steps")}


def early_problems(path: str, overrides: Sequence[str]) -> tuple[list[str], bool]:
    """Return the problems of a run's YAML with overrides, each as the later checks would tell it.

    And whether the schema does not hold, so that nothing further can be checked.
    """
    try:
        tree = _tree(path, overrides)
        for key in OF_PLUGINS if tree.get("plugins") else ():
            _leave_out(tree, key)
        with registry.names_only():
            config = parse_config(tree, path, overrides)
    except UserError as error:  # a ConfigError has all problems
        return list(map(str, error.args)), True
    return list(map(str, _problems(config))), False


def shorter_warmup(path: str, overrides: Sequence[str]) -> list[str]:
    """Return the override that ends the warm-up with a run that the command line alone cuts short.

    `train.steps=2` is how a run is tried. Empty: the warm-up fits, or the command line sets the schedule too.

    Raises:
        UserError: for a file that cannot be read, or an override of another form.
    """
    keys = {override.partition("=")[0] for override in overrides}
    if "train.steps" not in keys or keys & OF_SCHEDULE:
        return []
    tree = _tree(path, overrides)
    train, optimizer = (tree.get(name) or {} for name in ("train", "optimizer"))
    if not (isinstance(train, dict) and isinstance(optimizer, dict)):
        return []
    steps, warmup = train.get("steps"), optimizer.get("warmup_steps")
    if type(steps) is int and type(warmup) is int and 0 < steps < warmup and not optimizer.get("decay_steps"):
        return [f"optimizer.warmup_steps={steps}"]
    return []


def _tree(path: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the run's mapping of keys, with its bases and the overrides."""
    with registry.names_only():
        tree = read_run(Path(path))
        for override in overrides:
            apply_override(tree, override)
    return tree


def _leave_out(tree: dict[str, Any], dotted: str) -> None:
    section, _, key = dotted.rpartition(".")
    holder = tree.get(section) if section else tree
    if isinstance(holder, dict):
        holder.pop(key, None)


def _problems(config: RunConfig) -> Iterator[Problem]:
    yield from size_problems(config.model)
    yield from schedule_problems(config)
    files: list[Callable[[], object]] = [lambda: read_deepspeed_config(config.parallel.deepspeed)]
    if (remote := config.checkpoint.remote) is not None:
        files.append(partial(check_folder, "checkpoint.remote", remote))
    if not config.data.mock and config.train.objective.name == DEFAULTS["objective"]:
        for path in (source.path for source in config.data.sources):
            if not (is_url(path) or is_pairs(path) or path.endswith(LABELLED)):  # which later checks tell
                files.append(partial(check_files, path, None))
    for check in files:
        try:
            check()
        except UserError as error:
            yield Problem.of(error)
