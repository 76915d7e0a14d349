"""Records of the experts chosen for every token: files that runs write and read.

    routing.json                          what the record is of (`fingerprint`)
    step_00000001.train.00000.choices     the choices of one step for the tokens of one data-parallel rank, in
                                          the layers of its pipeline stage
    step_00000001.val.00000.choices       those of a validation set at that step

A file is 8 bytes of magic, the SHA-256 of the rest, and a safetensors file: `ranks` (files of the step);
`start_R` and `length_R`, the runs of token indices; and for the n-th MoE layer `count_n` (experts of each
token) and `expert_n` (the experts, token by token, in order of choice). The files of the second stage follow
those of the first. Tokens have their index in the data of the run, so a record does not depend on the layout
of the ranks.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from megamoe.config import to_dict
from megamoe.config.layer_kinds import routed_by_layer
from megamoe.config.shapes import moe_layer_numbers, routed_experts
from megamoe.errors import UserError
from megamoe.io import read_json, read_plain, reason, replace_file
from megamoe.train.resolved import ResolvedRun

META = "routing.json"
MAGIC = b"MMROUTE1"
DIGEST = 32
NOT_OF_DATA = ("cache", "verify", "workers")  # keys that change no token
# Keys that are newer than the first records, with what those are of.
BEFORE: dict[str, Any] = {"model.architecture": "decoder", "train.objective": {"name": "causal"}}
FILE = re.compile(r"step_(\d{8,})\.(.+)\.(\d{5})\.choices")


@dataclass(frozen=True)
class Rows:
    """The choices of one layer for T tokens, by token index.

    index_T: int64, ascending. count_T: int64, experts of each token. expert_N: int64, token by token.
    """

    index_T: Tensor
    count_T: Tensor
    expert_N: Tensor

    @classmethod
    def of(cls, index_T: Tensor, count_T: Tensor, expert_N: Tensor) -> "Rows":
        """Build the rows of tokens in any order, on the CPU."""
        order_T = index_T.argsort(stable=True)
        first_T = count_T.cumsum(0) - count_T
        sorted_T = count_T[order_T]
        start_N = torch.repeat_interleave(first_T[order_T] - (sorted_T.cumsum(0) - sorted_T), sorted_T)
        return cls(index_T[order_T], sorted_T, expert_N[start_N + torch.arange(len(expert_N))])

    def find(self, index_T: Tensor) -> Tensor | None:
        """Return the places of tokens among the rows, int64; None if one is not there."""
        if len(self.index_T) == 0:
            return None if len(index_T) else index_T
        place_T = torch.searchsorted(self.index_T, index_T).clamp_max(len(self.index_T) - 1)
        return place_T if torch.equal(self.index_T[place_T], index_T) else None

    def choices(self, place_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of tokens, int64 [T, K], padded with expert 0, and their numbers, int64 [T]."""
        count_T = self.count_T[place_T]
        width = max(1, int(count_T.max())) if len(count_T) else 1
        first_T = (self.count_T.cumsum(0) - self.count_T)[place_T]
        column_K = torch.arange(width)
        place_TK = (first_T[:, None] + column_K).clamp_max(max(len(self.expert_N) - 1, 0))
        expert_TK = self.expert_N[place_TK] if len(self.expert_N) else torch.zeros_like(place_TK)
        return expert_TK.masked_fill(column_K >= count_T[:, None], 0), count_T


def fingerprint(run: ResolvedRun) -> dict[str, Any]:
    """Return what a record's run and the replaying one must have in common, by key."""
    config = run.config
    found: dict[str, Any] = {
        "moe.layers": moe_layer_numbers(config),
        "moe.num_experts": routed_by_layer(config) if config.moe.groups else routed_experts(config.moe),
        "seed": config.seed,
        "model.architecture": config.model.architecture,
        "train.objective": config.train.objective.to_dict(),
        "train.steps": run.steps,
        "train.global_batch_size": run.schedule.final,
        "train.batch_rampup": [run.schedule.start, run.schedule.increment, run.schedule.ramp_samples],
    }
    data = to_dict(config)["data"]
    found |= {f"data.{key}": value for key, value in data.items() if key not in NOT_OF_DATA}
    return json.loads(json.dumps(found))


def file_name(step: int, phase: str, rank: int) -> str:
    """Return the name of a rank's file; phase: `train`, or a validation set's name in metrics.jsonl."""
    return f"step_{step:08d}.{quote(phase, safe='')}.{rank:05d}.choices"


def recorded(folder: Path) -> Iterator[tuple[Path, int, str, int]]:
    """Yield the files of choices in a folder, each with its step, phase and rank."""
    for path in folder.glob("step_*.choices"):
        if match := FILE.fullmatch(path.name):
            yield path, int(match[1]), unquote(match[2]), int(match[3])


def check_folder(key: str, folder: Path, expected: dict[str, Any]) -> bool:
    """Return whether the folder holds a record, which must then be of this run's model and data.

    Raises:
        UserError: naming the first key that differs, or if the folder cannot be read.
    """
    path = folder / META
    if not folder.exists():
        return False
    try:
        found = read_json(path, 1 << 24)
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise UserError(f"{key}: {path}: {reason(error)}; expected the description of a record") from error
    for name, value in expected.items():
        recorded = found.get(name, BEFORE.get(name))
        if recorded != value:
            raise UserError(
                f"{key}: {folder} is a record of {name} {json.dumps(recorded)}, this run has "
                f"{json.dumps(value)}; name a record of the same model and data"
            )
    return True


def evaluated_steps(folder: Path, phase: str) -> list[int]:
    """Return the steps of which a record has choices of a phase, ascending."""
    return sorted(step for _, step, name, rank in recorded(folder) if (name, rank) == (phase, 0))


def begin_record(folder: Path, meta: dict[str, Any], step: int) -> None:
    """Create the folder, and remove the choices of steps after `step`, from which the run goes on.

    Raises:
        OSError: if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path, recorded_step, _, _ in recorded(folder):
        if recorded_step > step:
            path.unlink()
    replace_file(folder / META, (json.dumps(meta, indent=1) + "\n").encode())


def write_rows(path: Path, layers: dict[int, Rows], experts: Sequence[int], ranks: int) -> None:
    """Write the choices of one rank, whole or not at all.

    layers: by their places among the model's MoE layers, from 0; none in a stage without such layers.
    experts: their number in each of the model's MoE layers. ranks: the number of files of the step.

    Raises:
        OSError: if it cannot be written.
    """
    none = torch.zeros(0, dtype=torch.int64)
    index_T = next((rows.index_T for rows in layers.values()), none)
    begins_T = index_T.diff(prepend=index_T[:1] - 2) != 1
    first_R = begins_T.nonzero().squeeze(1)
    ends_R = torch.cat([first_R[1:], torch.tensor([len(index_T)])]) if len(first_R) else first_R
    tensors = {"ranks": torch.tensor([ranks]), "start_R": index_T[first_R], "length_R": ends_R - first_R}
    for place, rows in layers.items():
        tensors[f"count_{place}"] = _compact(rows.count_T, experts[place] + 1)
        tensors[f"expert_{place}"] = _compact(rows.expert_N, experts[place])
    payload = save(tensors)
    replace_file(path, MAGIC + hashlib.sha256(payload).digest() + payload)


def _compact(numbers: Tensor, bound: int) -> Tensor:
    """Return the numbers in a small dtype; some reach `bound` if a token has an expert several times."""
    largest = max(bound - 1, int(numbers.max()) if len(numbers) else 0)
    dtype = torch.uint8 if largest < 256 else torch.int16 if largest < 2**15 else torch.int32
    return numbers.to(dtype).contiguous()


def read_rows(folder: Path, step: int, phase: str, num_layers: int) -> list[Rows]:
    """Return the choices of a step, of all ranks together, for each MoE layer.

    Raises:
        ValueError: if they are not there, or not whole.
    """
    parts = [_read_file(folder / file_name(step, phase, 0))]
    ranks = int(parts[0]["ranks"])
    parts += [_read_file(folder / file_name(step, phase, rank)) for rank in range(1, ranks)]
    layers = []
    try:
        for place in range(num_layers):
            having = [part for part in parts if f"count_{place}" in part]
            index_T = torch.cat([_indices(part["start_R"], part["length_R"]) for part in having])
            count_T, expert_N = (
                torch.cat([part[f"{word}_{place}"].long() for part in having]) for word in ("count", "expert")
            )
            layers.append(Rows.of(index_T, count_T, expert_N))
    except (KeyError, ValueError, RuntimeError, IndexError) as error:
        raise ValueError(f"unexpected tensors ({error})") from error
    return layers


def _indices(start_R: Tensor, length_R: Tensor) -> Tensor:
    before_R = length_R.cumsum(0) - length_R
    first_T = torch.repeat_interleave(start_R - before_R, length_R)
    return first_T + torch.arange(len(first_T))


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        content = read_plain(path, path.stat().st_size)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name}: {reason(error)}") from error
    head, payload = content[: len(MAGIC) + DIGEST], content[len(MAGIC) + DIGEST :]
    if head != MAGIC + hashlib.sha256(payload).digest():
        raise ValueError(f"{path.name} is torn or was changed: its checksum does not match")
    try:
        return load(payload)
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from error


def last_whole_step(folder: Path, num_layers: int) -> tuple[int, str]:
    """Return the last training step whose choices are whole (0: none), and why the one after is not.

    Only the end of the record is read, where a power failure leaves torn files; every file is checked again
    when its step is replayed.
    """
    steps = {step for _, step, phase, _ in recorded(folder) if phase == "train"}
    problem = "it is not in the record"
    for step in sorted(steps, reverse=True):
        try:
            read_rows(folder, step, "train", num_layers)
        except ValueError as error:
            problem = str(error)
        else:
            return step, problem
    return 0, problem
