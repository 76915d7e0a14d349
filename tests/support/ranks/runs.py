"""A small run for these tests, and the jobs that several of them send to the pool."""

import copy
import gc
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megamoe.apps.verify.layouts import CUT_ALL as CUT_ALL
from megamoe.config import RunConfig, parse_config
from megamoe.data.batches import Batch
from megamoe.moe.router import Router
from megamoe.moe.routing import Routing
from megamoe.parallel.layout import Layout
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool

ROOT = Path(__file__).resolve().parents[3]
WORDS = ("lm_loss", "loss", "grad_norm")
DS_CONFIGS = ROOT / "ds_configs"
# The files that run anywhere: fp16 needs a device that computes in it, NVMe a compiled op. Those for CUDA
# differ from others by what a CPU does not have; tests/cuda runs them.
PLAIN_FILES = [
    path.stem
    for path in sorted(DS_CONFIGS.glob("*.json"))
    if not path.stem.endswith(("fp16", "nvme", "_cuda"))
]

# Of 21 words, the mock chain visits every third (its stride is 7): in some sequences a third of the tokens
# are ends of documents, in others none is, so loss masks differ much between micro batches.
SMALL_RUN: dict[str, Any] = {
    "name": "small",
    "data": {"mock": True, "document_aware": True, "sequence_length": 32, "workers": 0},
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "ffn_hidden_size": 64,
        "vocab_size": 21,
        "init_std": 0.1,
    },
    "moe": {
        "layers": {"at": [2]},
        "num_experts": 8,
        "expert_ffn_hidden_size": 32,
        "num_shared_experts": 1,
        "router": {"scorer": {"name": "linear", "jitter": 0.1}, "selector": {"name": "top_k", "k": 2}},
        "losses": {"switch_balance": 0.1, "z_loss": 0.01},
    },
    "optimizer": {"lr": 1e-3, "schedule": "constant", "grad_clip": 0.3},
    "train": {"steps": 100, "micro_batch_size": 1, "global_batch_size": 8},
    "evaluation": {"batches": 1},
}
Job = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


def small_run(output: Path | str = "unused", **changes: Any) -> RunConfig:
    """SMALL_RUN with changes, written with two underscores for a dot: moe__num_experts=4."""
    tree = copy.deepcopy(SMALL_RUN)
    tree["output"] = str(output)
    for dotted, value in changes.items():
        *sections, key = dotted.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return parse_config(tree)


def ds_config(name: str) -> str:
    """Return the path of a file of ds_configs/."""
    return str(DS_CONFIGS / f"{name}.json")


def ds_variant(folder: Path, name: str, **sections: dict[str, Any]) -> str:
    """Copy a file of ds_configs/ to `folder` with keys of its sections changed; return its path."""
    content = json.loads((DS_CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    for section, changes in sections.items():
        content[section] = {**content.get(section, {}), **changes}
    path = folder / f"{name}_variant.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def ds_file(folder: Path, name: str) -> str:
    """Return the path of a file of ds_configs/; at ZeRO 3, of a copy in `folder` by which all is cut."""
    return ds_variant(folder, name, zero_optimization=CUT_ALL) if "zero3" in name else ds_config(name)


@dataclass(frozen=True)
class Place:
    """Where a run in fp32 trains: its layout, its ZeRO stage, and what is recomputed."""

    ranks: int = 1
    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    zero: int = 0
    sequence: bool = False
    recompute: str = "none"
    pipeline: int = 1
    chunks: int = 1
    context: int = 1

    def __str__(self) -> str:
        sizes = {"PP": self.pipeline, "VP": self.chunks, "CP": self.context}
        sizes |= {"TP": self.tensor, "EP": self.expert, "ETP": self.expert_tensor}
        words = ["1 rank" if self.ranks == 1 else f"{self.ranks} ranks"]
        words += [f"{name} {size}" for name, size in sizes.items() if size > 1]
        words += ["SP"] * self.sequence + [f"ZeRO {self.zero}"]
        return ", ".join(words + [f"recompute {self.recompute}"] * (self.recompute != "none"))

    @property
    def layout(self) -> Layout:
        sizes = (self.tensor, self.expert, self.expert_tensor, self.pipeline, self.context)
        return Layout(self.ranks, *sizes)

    def changes(self, folder: Path) -> dict[str, Any]:
        """Return the changes for `small_run`; folder: receives a separate DeepSpeed file."""
        return parallel_changes(self, ds_file(folder, f"zero{self.zero}_fp32"))


def parallel_changes(place: Any, deepspeed: str) -> dict[str, Any]:
    """Return the layout and the recomputation of a `Place` or a case of the matrix, for `small_run`."""
    names = ("tensor", "expert", "expert_tensor", "sequence", "pipeline", "context")
    return {
        **{f"parallel__{name}": getattr(place, name) for name in names},
        "parallel__pipeline_chunks": place.chunks,
        "parallel__deepspeed": deepspeed,
        "model__recompute": place.recompute,
    }


def run_steps(steps: int, save: bool = False, **changes: Any) -> dict[str, list[Any]]:
    """Job: return what `recorded_steps` tells of a run; with `save`, write a checkpoint at its end."""
    (found,) = run_each([{**changes, "steps": steps, "save": save}])
    return found


def run_each(runs: list[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    """Job: what `run_steps` returns for each of several runs, one after the other in one world.

    runs: the arguments of `run_steps`.
    """
    return [_run(**arguments) for arguments in runs]


def _run(steps: int, save: bool = False, **changes: Any) -> dict[str, list[Any]]:
    trainer = Trainer(small_run(**changes))
    found = recorded_steps(trainer, steps)
    if save:
        trainer.save()
    trainer.saver.checkpoints.close()
    del trainer
    gc.collect()  # an engine and its parameters refer to each other
    return found


def recorded_steps(trainer: Trainer, steps: int) -> dict[str, list[Any]]:
    """Take steps, close the trainer's stream but not its world, and return each step's results on this rank.

    lm_loss, loss, grad_norm, lr, batch_size: of the whole batch. masks, samples: for this rank's micro
    batches, the number of unmasked tokens and the sample numbers. chosen: int64 [n, 4],
    rows (layer, token index, choice, expert) of this rank's tokens.
    """
    chosen: list[Tensor] = []
    batches: list[Batch] = []
    _record_routers(trainer.engine.model, chosen)
    _record_batches(trainer, batches)
    words = (*WORDS, "lr", "batch_size")
    found: dict[str, list[Any]] = {word: [] for word in (*words, "masks", "samples", "chosen")}
    for _ in range(steps):
        chosen.clear()
        batches.clear()
        _, metrics = trainer.step()
        for word in words:
            found[word].append(metrics[f"train/{word}"])
        found["masks"].append([float(batch.loss_mask_BS.sum()) for batch in batches])
        found["samples"].append([batch.sample_index_B.tolist() for batch in batches])
        none = torch.empty(0, 4, dtype=torch.int64)  # on a pipeline stage without an MoE layer
        found["chosen"].append(torch.cat([none, *chosen]))
    trainer._stream.close()
    return found


def train_each(runs: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Train several runs, one after the other in one world; return of each what `recorded_steps` tells.

    Beside it are the weights at the end, by name, and the history of the routers. runs: changes for
    `small_run`; with `saves`, a run saves a checkpoint before its last step.
    """
    results = []
    for changes in runs:
        options = dict(changes)
        saves = options.pop("saves", False)
        trainer = Trainer(small_run(**options))
        missing = steps - trainer.progress.step
        found: dict[str, Any] = recorded_steps(trainer, missing - 1)
        if saves:
            trainer.save()
        trainer._stream = trainer._stream_of(trainer.datasets.train, trainer.progress.samples, 0)
        last = recorded_steps(trainer, 1)
        found = {word: [*found[word], *last[word]] for word in last}
        found["weights"] = {name: it.detach().clone() for name, it in trainer.model.named_parameters()}
        found["history"] = trainer.routing_history.state()
        trainer.release()
        results.append(found)
        del trainer
        gc.collect()
    return results


def assert_same_to_the_bit(
    pool: Pool, job: Job, alone: dict[str, Any], folder: Path, router: dict[str, Any], *more: dict[str, Any]
) -> None:
    """Recomputed, recorded, replayed, saved and resumed runs of one rank, and `more`, end as `alone` does.

    job: `train_each` with the changes of all runs. router: their `moe.router`.
    """
    record = str(folder / "record")
    first = {"output": folder, "name": "saved"}
    runs = [
        {"model__recompute": "full"},
        *more,
        {"output": folder, "name": "recorded", "log__routing": record},
        {"moe__router": {**router, "replay": record}},
        {**first, "saves": True},
        {**first, "checkpoint__resume": str(folder / "saved" / "checkpoints" / "step_00000001")},
    ]
    (found,) = pool.run(job, runs, ranks=1)
    for each in found:
        assert each["loss"][-1] == alone["loss"][-1]
        assert all(torch.equal(each["weights"][name], weight) for name, weight in alone["weights"].items())
        assert each["history"] == alone["history"]


def assert_moves(pool: Pool, job: Job, alone: dict[str, Any], folder: Path, target: Place) -> None:
    """A checkpoint of two ranks is resumed by `target`, and the run ends as `alone` does; job: as above."""
    source = Place(2, expert=2, zero=1).changes(folder)
    pool.run(job, [{"output": folder, "name": "saved", "saves": True, **source}], ranks=2)
    path = str(folder / "saved" / "checkpoints" / "step_00000001")
    changes = {"output": folder, "name": "moved", "checkpoint__resume": path, **target.changes(folder)}
    for (rank,) in pool.run(job, [changes], ranks=target.ranks):
        assert rank["loss"][-1] == pytest.approx(alone["loss"][-1], rel=1e-5)
        assert rank["history"] == alone["history"]


def trained_on_bytes(output: Path, models: dict[str, dict[str, Any]]) -> None:
    """Job: a step and a checkpoint of each model, whose tokens are bytes, by the name of its run."""
    for name, changes in models.items():
        data = {"data__tokenizer": "bytes", "model__vocab_size": None, "train__global_batch_size": 4}
        trainer = Trainer(small_run(output, **data, **changes, name=name))
        trainer.step()
        trainer.save()
        trainer.release()


def assert_as_alone(found: Sequence[dict[str, Any]], alone: dict[str, Any], name: str = "") -> None:
    """Every rank shows the losses and norms of one rank alone, and together they chose the same experts.

    found, alone: what `recorded_steps` returned on each rank, and on the one.
    """
    for word in WORDS:
        for rank in found:
            assert rank[word] == pytest.approx(alone[word], rel=1e-5), f"{name}: {word}"
    assert_same_experts(found, alone, name)


def assert_same_experts(found: Sequence[dict[str, Any]], alone: dict[str, Any], name: str = "") -> None:
    """In each step, the ranks together chose the experts that one rank alone chose."""
    for step, chosen in enumerate(alone["chosen"]):
        # Every tensor rank knows the whole micro batch's routing; recomputed, a router is asked twice.
        together = torch.cat([rank["chosen"][step] for rank in found]).unique(dim=0)
        assert torch.equal(together, chosen.unique(dim=0)), f"{name}: other experts in step {step + 1}"


def _record_routers(model: nn.Module, chosen: list[Tensor]) -> None:
    def record(router: Router, inputs: tuple[Any, ...], routing: Routing) -> None:
        pairs = routing.pairs.keep(routing.pairs.token_N < routing.num_tokens)  # not what fills the places
        index_T = inputs[1].token_index(routing.num_tokens, pairs.token_N.device)
        layer_N = torch.full_like(pairs.token_N, router.scorer.dims.layer)
        chosen.append(torch.stack([layer_N, index_T[pairs.token_N], pairs.choice_N, pairs.expert_N], 1))

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(record)


def _record_batches(trainer: Trainer, batches: list[Batch]) -> None:
    """Record every micro batch that the trainer takes."""

    class Recording(type(trainer._stream)):  # type: ignore[misc]
        def __next__(self) -> Batch:
            batches.append(super().__next__())
            return batches[-1]

    trainer._stream.__class__ = Recording
