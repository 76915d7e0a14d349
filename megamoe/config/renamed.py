"""Keys of the configuration that had another name in earlier versions.

A YAML or an override with an old key is read under the new name, with a warning. The configuration in an
older checkpoint is converted without one.
"""

import copy
import os
import sys
from collections.abc import Iterator
from typing import Any

from megamoe.errors import UserError

RENAMED = {
    "moe.router.gate": "moe.router.score_function",
    "moe.router.restrictions": "moe.router.masks",
    "moe.router.system": "moe.router.preset",
    "moe.expert_dropout": "moe.expert_output_dropout",
}


def with_new_names(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration's mapping in which every old key has its new name.

    If a key is there under both names, the value of the new one is kept.
    """
    tree = copy.deepcopy(tree)
    for _, node, key, new in _old_keys(tree):
        node.setdefault(new, node.pop(key))
    return tree


def read_old_names(tree: dict[str, Any], source: str) -> dict[str, Any]:
    """Return `with_new_names`, after a warning of the first rank for each old key. source: named in errors.

    Raises:
        UserError: if a key is there under both names.
    """
    for old, node, _, new in _old_keys(tree):
        if new in node:
            raise UserError(f"{source}: {old} and {RENAMED[old]} are one key; give {RENAMED[old]} alone")
        _warn(old, source)
    return with_new_names(tree)


def read_old_key(dotted: str, source: str) -> str:
    """Return the dotted key of an override under its new name, after a warning if it has an old one."""
    for old, new in RENAMED.items():
        if f"{dotted}.".startswith(f"{old}."):
            _warn(old, source)
            return new + dotted[len(old) :]
    return dotted


def _warn(old: str, source: str) -> None:
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        line = f"warning: {source}: {old} is named {RENAMED[old]} now; it is read under this name"
        print(line, file=sys.stderr, flush=True)


def _old_keys(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """Yield each old key that is there, the mapping that has it, and the old and the new name in it."""
    for old, new in RENAMED.items():
        *sections, key = old.split(".")
        node: Any = tree
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and key in node:
            yield old, node, key, new.rpartition(".")[2]
