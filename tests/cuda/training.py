"""Whole runs of the trainer, and what they are held to on the pretended device."""

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from megamoe.config import parse_config
from megamoe.train.loop import Loop, train

STEPS = 4
MEASURED = 3  # the step that is measured: DeepSpeed's timers begin with it; the last one evaluates
WORDS = ("train/lm_loss", "train/loss", "train/grad_norm", "val/lm_loss")
SMALL: dict[str, dict[str, Any]] = {
    "data": {"mock": True, "sources": [], "sequence_length": 32, "workers": 0},
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "ffn_hidden_size": 64,
        "vocab_size": 96,
        "cpu_kernels": "plain",
        "gpu_kernels": "plain",
    },
    "moe": {"layers": {"every": 1}, "num_experts": 4, "expert_ffn_hidden_size": 32},
    "optimizer": {"warmup_steps": 0},
    "train": {"steps": STEPS, "micro_batch_size": 2},
    "evaluation": {"batches": 1},
    "log": {"report": False},
}

Tree = dict[str, Any]


def small(name: str, **changes: Any) -> Tree:
    """SMALL with changes, written with two underscores for a dot."""
    tree: Tree = json.loads(json.dumps({"name": name, **SMALL}))
    for dotted, value in changes.items():
        *sections, key = dotted.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return tree


def run_tree(tree: Tree, folder: str) -> dict[str, list[float]]:
    """Train the run to its end; on the first rank, who writes them, the losses by their names."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        train(parse_config({**tree, "output": folder, "overwrite": True}))
    if os.environ["RANK"] != "0":
        return {}
    lines = (Path(folder) / tree["name"] / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {word: [record[word] for record in records if word in record] for word in WORDS}


def run_all(trees: list[Tree]) -> list[dict[str, list[float]]]:
    """Job of one rank on the CPU: the losses of each run, one after the other in a world of their own."""
    port = int(os.environ["MASTER_PORT"])
    folder = str(Path(tempfile.gettempdir()) / f"megamoe_cuda_{port}")  # the same of all ranks
    found = []
    for place, tree in enumerate(trees):
        os.environ["MASTER_PORT"] = str(port + place)
        found.append(run_tree(tree, folder))
        gc.collect()  # an engine and its parameters know each other
    if os.environ["RANK"] == "0":
        shutil.rmtree(folder, ignore_errors=True)
    return found


def watch_steps(mark: Callable[[], None]) -> None:
    """Call `mark` before and after every step of every loop from now on."""
    plain = Loop._one_step

    def watched(self: Loop) -> str | None:
        mark()
        reason = plain(self)
        mark()
        return reason

    Loop._one_step = watched  # type: ignore[method-assign]


def watch_engines(mark: Callable[[Any], None]) -> None:
    """Call `mark` with the model before every engine that DeepSpeed builds from now on."""
    import deepspeed

    plain = deepspeed.initialize

    def watched(*arguments: Any, **named: Any) -> Any:
        mark(named["model"])
        return plain(*arguments, **named)

    deepspeed.initialize = watched
