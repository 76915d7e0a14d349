"""Steps of datatrove's pipelines that end in a dataset: `WriteTokens` in each task, then `MergeTokens`.

Each task writes one part, named by its rank. So the result depends on the number of tasks, which divides the
input, and not on the executor, its workers or restarts: a task that was killed writes its part again, and a
merge goes on where it stopped. Needs the extra `datatrove`. Copy this file beside your pipeline; jobs find it
by PYTHONPATH.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from datatrove.io import DataFolder, get_datafolder
from datatrove.pipeline.base import PipelineStep

from megamoe.apps.prepare.index_writer import token_dtype
from megamoe.apps.prepare.parts import FOLDER, RECORDS, Part, join_parts, unfinished
from megamoe.apps.prepare.prepare import in_batches, publish
from megamoe.apps.prepare.write import TextCounts, locked_folder, reference_of, write_card, write_tokens
from megamoe.data.card import DataCard, DataFiles, SourceCard, StepCard
from megamoe.data.tokenizers import load_tokenizer
from megamoe.errors import UserError

VERSION = 2  # part of a part's key


def _part(prefix: str, tokenizer: str, rank: int, world_size: int) -> Part:
    """Return the part of a task; its key changes with the tokenizer and the number of tasks."""
    facts = [VERSION, load_tokenizer(tokenizer).fingerprint, rank, world_size]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return Part(DataFiles(DataFiles(Path(prefix)).partial / FOLDER / f"{rank:05}"), (), key)


class WriteTokens(PipelineStep):
    """Tokenizes the documents of a task and writes them as a part of the dataset `prefix`. The last step.

    prefix, tokenizer: as `--output` and `--tokenizer` of tools/prepare_data.py; not `train`.
    """

    type = "megamoe"
    name = "write tokens"

    def __init__(self, prefix: str, tokenizer: str) -> None:
        super().__init__()
        self.prefix, self.tokenizer = str(Path(prefix).absolute()), _absolute(tokenizer)
        load_tokenizer(self.tokenizer)  # an error now, and not in each task

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        part, tokenizer = _part(self.prefix, self.tokenizer, rank, world_size), load_tokenizer(self.tokenizer)
        part.files.prefix.parent.mkdir(parents=True, exist_ok=True)
        part.discard()
        counts, digest = TextCounts(), hashlib.sha256()

        def texts() -> Iterator[str]:
            for document in data or ():
                if not document.text.strip():
                    counts.empty_documents += 1
                    self.stat_update("empty")
                    continue
                content = document.text.encode("utf-8")
                digest.update(len(content).to_bytes(8, "little") + content)
                counts.documents += 1
                counts.text_bytes += len(content)
                self.stat_update("documents")
                yield document.text

        with self.track_time("task"):
            write_tokens(in_batches(texts()), tokenizer, part.files)
        name = f"task {rank} of {world_size}"
        counts.sources.append(SourceCard(name, counts.text_bytes, digest.hexdigest(), counts.documents))
        part.finish(asdict(counts))
        yield from ()


class MergeTokens(PipelineStep):
    """Joins the parts of all tasks of an earlier pipeline to the dataset; a pipeline of one task.

    Args:
        prefix: as for `WriteTokens`.
        tokenizer: as for `WriteTokens`.
        tasks: their number.
        counted: the logging folders of pipelines whose counts go into the card, with their numbers of tasks.
    """

    type = "megamoe"
    name = "merge tokens"

    def __init__(
        self,
        prefix: str,
        tokenizer: str,
        tasks: int,
        counted: Sequence[tuple[Any, int]] = (),
    ) -> None:
        super().__init__()
        self.prefix, self.tokenizer = str(Path(prefix).absolute()), _absolute(tokenizer)
        self.tasks = tasks
        self.counted = [(get_datafolder(folder), number) for folder, number in counted]

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        if rank == 0:
            self.merge()
        yield from data or ()

    def merge(self) -> DataCard:
        """Write the dataset and return its card.

        Raises:
            UserError: if the part of a task is missing, or the dataset exists.
        """
        files, tokenizer = DataFiles(Path(self.prefix)), load_tokenizer(self.tokenizer)
        if files.card.exists():
            raise UserError(f"output {self.prefix!r} exists; remove it or choose another prefix")
        new = DataFiles(files.partial / files.prefix.name)
        with locked_folder(files.partial, self.prefix, kept=(FOLDER, new.bin.name), worth=RECORDS):
            parts = [_part(self.prefix, self.tokenizer, number, self.tasks) for number in range(self.tasks)]
            missing = unfinished(parts, new.bin)
            if missing:
                raise UserError(
                    f"output {self.prefix!r}: {len(missing)} of {self.tasks} tasks have not finished, the "
                    f"first is {missing[0].files.prefix.name}; run their pipeline again"
                )
            counts = TextCounts()
            for part in parts:
                record = part.read()
                assert record is not None, "every part is finished"
                counts.add(record["facts"])
            counts.check(self.tasks)
            counts_V = join_parts(parts, new, token_dtype(tokenizer.vocab_size))
            reference = reference_of(tokenizer, files.prefix.parent, new.tokenizer, files.tokenizer)
            steps = [step for folder, number in self.counted for step in counts_of_steps(folder, number)]
            card = write_card(counts, tokenizer, reference, new, counts_V, steps)
            publish(new, files, tokenizer)
        self.stat_update("documents", value=card.documents)
        self.stat_update("tokens", value=card.tokens)
        return card


def counts_of_steps(logging_dir: DataFolder, tasks: int) -> list[StepCard]:
    """Return what the steps of a pipeline counted in all of its tasks, without times.

    Raises:
        UserError: if the counts of a task are missing.
    """
    names: list[str] = []
    totals: list[dict[str, int]] = []
    for rank in range(tasks):
        try:
            with logging_dir.open(f"stats/{rank:05d}.json") as file:
                steps = json.load(file)
        except (OSError, ValueError) as error:
            raise UserError(
                f"pipeline {logging_dir.path!r}: no counts of task {rank}; run it again"
            ) from error
        names = names or [step["name"] for step in steps]
        totals = totals or [{} for _ in steps]
        for step, total in zip(steps, totals, strict=True):
            for label, count in step["stats"].items():
                value = count["total"] if isinstance(count, dict) else count
                total[label] = total.get(label, 0) + int(value)
    return [StepCard(name, dict(sorted(total.items()))) for name, total in zip(names, totals, strict=True)]


def _absolute(tokenizer: str) -> str:
    """Return a tokenizer's reference that means the same in every folder; a name such as `bytes` stays."""
    return str(Path(tokenizer).absolute()) if Path(tokenizer).exists() else tokenizer
