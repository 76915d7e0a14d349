"""Keys of the configuration that had another name in earlier versions.

A YAML with an old key is refused, and the message gives the new name. The configuration in an older
checkpoint is converted to the new names, so the checkpoint still loads.
"""

import copy
from typing import Any

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
    for old, new in RENAMED.items():
        *sections, key = old.split(".")
        node: Any = tree
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and key in node:
            value = node.pop(key)
            node.setdefault(new.rpartition(".")[2], value)
    return tree
