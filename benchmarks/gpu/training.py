"""Section `training`: speed and memory of a model of 1 B parameters, beside the roofline model's figures."""

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from common.timers import clock
from gpu.findings import Machine, Section
from gpu.ranks import Failed, on_ranks, start
from megamoe.config import load_config
from megamoe.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "benchmarks/rooflines/models/moe_1b.yaml")
MOST_RANKS = 8
WARM_UP, STEPS = 3, 8
TIMEOUT_S = 240.0
# The rehearsal's model has the same parts.
SMALL = (
    "data.sequence_length=64",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_attention_heads=2",
    "model.ffn_hidden_size=96",
    "model.vocab_size=512",
    "moe.expert_ffn_hidden_size=48",
    "train.micro_batch_size=1",
)


def run(machine: Machine, section: Section) -> None:
    """Report tokens/s, the step's time and the peak of memory; the loss must fall and be finite."""
    ranks = 1 << (min(machine.count, MOST_RANKS).bit_length() - 1)
    for expert in sorted({1, ranks}, reverse=True):
        overrides = [f"parallel.expert={expert}", *(SMALL if machine.quick else ())]
        name = f"{ranks} ranks, EP {expert}"
        try:
            found = on_ranks(machine, ranks, "training", {"overrides": overrides}, TIMEOUT_S)
        except Failed as error:
            section.add(name, str(error), holds=False)
            continue
        losses, seconds = found["losses"], statistics.median(found["seconds"])
        finite = all(abs(loss) < float("inf") for loss in losses)
        section.add(
            f"{name}: loss", losses[-1], "nats", finite and losses[-1] < losses[0], f"first {losses[0]:.3f}"
        )
        section.add(f"{name}: step", 1e3 * seconds, "ms", note=f"median of {STEPS}")
        section.add(f"{name}: speed", ranks * found["tokens"] / seconds, "tokens/s")
        if found["peak_bytes"]:
            section.add(f"{name}: peak of memory", found["peak_bytes"] / 1e9, "GB", note="allocated, rank 0")
        _beside_the_model(section, name, ranks, overrides, seconds)


def _beside_the_model(section: Section, name: str, ranks: int, overrides: list[str], seconds: float) -> None:
    """Add what the simulation says of the same step: FLOPs, from which utilisation follows, and memory."""
    command = ["benchmarks/roofline.py", "--config", CONFIG, "--ranks", str(ranks), "--json", *overrides]
    try:
        figures = json.loads(start(Machine("cpu", 1, True), 1, command, TIMEOUT_S).splitlines()[-1])
    except (Failed, ValueError) as error:
        section.add(f"{name}: simulated", str(error)[:300], note="no utilisation without it")
        return
    section.add(
        f"{name}: rate", figures["flops"] / seconds / 1e12, "TFLOP/s", note="simulated FLOPs, measured time"
    )
    section.add(f"{name}: simulated peak of memory", figures["peak_bytes"] / 1e9, "GB")
    gpu = _table_name()
    if gpu in figures:
        utilisation = figures[gpu]["utilisation"] * figures[gpu]["ms"] / (1e3 * seconds)
        section.add(
            f"{name}: model FLOP utilisation", utilisation, note="of the bf16 peak; 3 x forward products"
        )
        section.add(f"{name}: simulated step", figures[gpu]["ms"], "ms", note="roofline model")


def _table_name() -> str:
    """Return the key of this device in the roofline model's table, or nothing."""
    if not torch.cuda.is_available():
        return ""
    name = torch.cuda.get_device_name(0).lower()
    return next(
        (known for known in ("a100", "h100", "b200") if known in name), "h100" if "h200" in name else ""
    )


def on_rank(given: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank."""
    common = ["data.workers=0", "evaluation.batches=0", "optimizer.schedule=constant", "log.report=false"]
    config = load_config(CONFIG, [*common, "output=unused", *given["overrides"]])
    trainer = Trainer(config)
    losses, seconds = [], []
    for number in range(WARM_UP + STEPS):
        started = clock()
        _, metrics = trainer.step()
        if number >= WARM_UP:
            seconds.append(clock() - started)
        losses.append(metrics["train/lm_loss"])
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    rank, data = trainer.world.rank, trainer.layout.data
    tokens = config.train.micro_batch_size * config.data.sequence_length * data // trainer.world.size
    trainer.close()
    return {"rank": rank, "losses": losses, "seconds": seconds, "peak_bytes": peak, "tokens": tokens}
