"""Small prepared data in place of a run's own, for objectives that read more than text."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from megamoe.apps.chat.prepare import ChatPreparation, prepare_chat
from megamoe.apps.translation.prepare import PairPreparation, prepare_pairs
from megamoe.apps.verify.small import Changes
from megamoe.config import RunConfig
from megamoe.objectives.objective import objective_class

TEXTS = 64  # of each kind
COMMON: Changes = {
    "data.mock": False,
    "data.sequence_length": 64,
    "data.split": [0.8, 0.2, 0.0],
    "model.vocab_size": None,
}


def mock_data(config: RunConfig, folder: Path) -> Changes | None:
    """Write pairs, conversations or texts with labels to a folder, which the objective reads.

    Returns: the keys that name them; None for an objective that reads text, or labels that are no words.
    """
    objective, part = config.train.objective.to_dict(), objective_class(config)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if part.reads == "pairs":
        languages = objective.get("languages") or ["de"]
        lines = "".join(f"{n} {'s' * (n % 9)}\t{'t' * (n % 12 + 1)} {n}\n" for n in range(TEXTS))
        (folder / "pairs.tsv").write_text(lines)
        files, output = [[language, str(folder / "pairs.tsv")] for language in languages], folder / "out"
        prepare_pairs(PairPreparation(str(output), tsv=files, tokenizer="bytes", split=[0.7, 0.3, 0.0]))
        source = output / "pairs" / "train"
        objective |= {"bucket": 4, "validate": []}
    elif part.reads == "text" and part.pads:
        turns = (("user", "say {0}"), ("assistant", "it is {0}"))
        talks = [[{"role": r, "content": text.format(n)} for r, text in turns] for n in range(TEXTS)]
        _write_lines(folder / "chat.jsonl", [{"messages": messages} for messages in talks])
        source = folder / "chat"
        prepare_chat(ChatPreparation(str(source), [str(folder / "chat.jsonl")], "bytes", template="plain"))
    elif part.predicts == "label":
        labels = [f"label {n}" for n in range(config.model.num_labels or 2)]
        (folder / "labels.json").write_text(json.dumps({"labels": labels}))
        rows = [{"text": "x" * (n % 9 + 1) + str(n), "label": labels[n % len(labels)]} for n in range(TEXTS)]
        for each in ("train", "valid"):
            _write_lines(folder / f"{each}.jsonl", rows)
        source = folder / "train.jsonl"
        objective["languages"] = []
    else:
        return None
    sources = [{"path": str(source), "weight": 1.0}]
    tokenizer = "bytes" if part.reads == "labels" else None  # other data name their own
    return {**COMMON, "data.sources": sources, "data.tokenizer": tokenizer, "train.objective": objective}


def _write_lines(path: Path, records: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
