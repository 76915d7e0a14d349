"""Section `training`: speed and memory of a model of 1 B parameters, beside the roofline model's figures."""

import json
import statistics
from pathlib import Path
from typing import Any

import torch

from common.timers import clock
from gpu.findings import Machine, Section
from gpu.ranks import Failed, on_ranks, start
from gpu.trace import profiled
from megamoe.apps.plan.assumptions import ASSUMED
from megamoe.config import load_config
from megamoe.metrics.gpus import GPUS, gpu_of_device
from megamoe.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "benchmarks/rooflines/models/moe_1b.yaml")
MOST_RANKS = 8
WARM_UP, STEPS, FREE, PROFILED = 3, 7, 20, 2
TIMEOUT_S = 90.0
TRITON = "model.gpu_kernels=triton"
# Those of docs/scale/gpu.md, with reductions beside the backward pass and Triton's kernels; and the defaults.
SETTINGS = {"tuned": ("parallel.deepspeed=ds_configs/zero1_bf16_cuda.json", TRITON), "default": ()}
FEW_TOKENS = ("data.sequence_length=128", "train.micro_batch_size=1")
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
    """Report speed, memory and the device's time by part beside the model's; the loss must fall."""
    ranks = 1 << (min(machine.count, MOST_RANKS).bit_length() - 1)
    for setting in SETTINGS:
        of_setting = settings_on(machine, setting)
        for expert in sorted({1, ranks}, reverse=True):
            overrides = [f"parallel.expert={expert}", *of_setting, *(SMALL if machine.quick else ())]
            name = f"{ranks} ranks, EP {expert}, {setting}"
            try:
                found = on_ranks(
                    machine, ranks, "training", {"overrides": overrides}, machine.limit(TIMEOUT_S)
                )
            except Failed as error:
                section.add(name, str(error), holds=False)
                continue
            _report(section, name, ranks, found)
            _beside_the_model(machine, section, name, ranks, overrides, found)


def settings_on(machine: Machine, name: str) -> list[str]:
    """Return the overrides of a setting, on a CPU without those that need CUDA."""
    return [each for each in SETTINGS[name] if machine.device == "cuda" or each != TRITON]


def _report(section: Section, name: str, ranks: int, found: dict[str, Any]) -> None:
    losses, seconds = found["losses"], found["free"]
    finite = all(abs(loss) < float("inf") for loss in losses)
    falls = finite and losses[-1] < losses[0]
    section.add(f"{name}: loss", losses[-1], "nats", falls, f"first {losses[0]:.3f}")
    section.add(
        f"{name}: step", 1e3 * seconds, "ms", note=f"mean of {FREE} between two waits, as in training"
    )
    one_by_one = 1e3 * statistics.median(found["seconds"])
    section.add(f"{name}: step with a wait after each", one_by_one, "ms", note=f"median of {STEPS}")
    section.add(f"{name}: speed", ranks * found["tokens"] / seconds, "tokens/s")
    if found["peak_bytes"]:
        section.add(f"{name}: peak of memory", found["peak_bytes"] / 1e9, "GB", note="allocated, rank 0")
    traced = found["traced"]
    section.add(f"{name}: device idle", traced["idle"], note="in traced steps, whose marks slow the host")
    section.add(f"{name}: NCCL's kernels", traced["nccl_ms"], "ms", note="with their waits for other ranks")
    for kernel, time_ms in traced["kernels"]:
        section.add(f"{name}: kernel {kernel}", time_ms, "ms")


def run_host(machine: Machine, section: Section) -> None:
    """Report the time of a step with so few tokens that the host's time is what it takes."""
    of_setting = settings_on(machine, "tuned")
    overrides = ["parallel.expert=1", *of_setting, *(SMALL if machine.quick else FEW_TOKENS)]
    found = on_ranks(machine, 1, "training", {"overrides": overrides}, machine.limit(55))
    seconds = found["free"]
    section.add("a step of few tokens on one rank", 1e3 * seconds, "ms", note=f"mean of {FREE}")
    figures = _simulated(machine, 1, overrides)
    expected = figures["host_seconds"]
    ratio = seconds / expected
    section.add(
        "the model's time of the host", 1e3 * expected, "ms", note=f"measured {ratio:.2f} times as long"
    )
    for kind in ("aten_call_s", "own_call_s", "collective_call_s"):
        note = f"{1e3 * seconds:.1f} ms a step of few tokens, over the model's {1e3 * expected:.1f}"
        section.expect(kind, 0, "", min(1.0, ratio * ASSUMED.of(kind)), note)


def _simulated(machine: Machine, ranks: int, overrides: list[str]) -> Any:
    """Return the figures of the same step by the simulation."""
    command = ["benchmarks/roofline.py", "--config", CONFIG, "--ranks", str(ranks), "--json", *overrides]
    limit = machine.limit(TIMEOUT_S)
    # PyTorch's CUDA build makes fake CUDA tensors only where there is a device.
    return json.loads(start(machine, 1, command, limit).splitlines()[-1])


def _beside_the_model(
    machine: Machine, section: Section, name: str, ranks: int, overrides: list[str], found: dict[str, Any]
) -> None:
    """Add what the simulation says of the same step: FLOPs, parts and memory."""
    seconds = found["free"]
    try:
        figures = _simulated(machine, ranks, overrides)
    except (Failed, ValueError) as error:
        section.add(f"{name}: simulated", str(error)[:300], note="no utilisation without it")
        return
    rate = figures["flops"] / seconds / 1e12
    section.add(f"{name}: rate", rate, "TFLOP/s", note="simulated FLOPs, measured time")
    section.add(f"{name}: simulated peak of memory", figures["peak_bytes"] / 1e9, "GB")
    gpu = _table_name() or "h100"
    model = figures[gpu]
    utilisation = model["utilisation"] * model["ms"] / (1e3 * seconds)
    section.add(f"{name}: model FLOP utilisation", utilisation, note=f"of the bf16 peak of {gpu}")
    bounds = f"optimistic {model['optimistic']['ms']:.1f}, pessimistic {model['pessimistic']['ms']:.1f}"
    expected = model["overlapped"]["ms"]
    text = f"expected {expected:.1f} ms ({bounds}), found {1e3 * seconds:.1f} ms"
    section.add(f"{name}: step", text)
    traced = found["traced"]["parts"]
    for part, expected_ms in sorted(model["parts_ms"].items(), key=lambda item: -item[1]):
        text = f"expected {expected_ms:.2f} ms, found {traced.pop(part, 0.0):.2f} ms"
        section.add(f"{name}: {part}", text, note="time of kernels")
    for part, time_ms in traced.items():
        section.add(f"{name}: {part}", f"expected nothing, found {time_ms:.2f} ms", note="time of kernels")


def _table_name() -> str:
    """Return the key of this device in the roofline model's table, or nothing."""
    if not torch.cuda.is_available():
        return ""
    known = gpu_of_device(torch.cuda.get_device_name(0))
    return next((key for key, gpu in GPUS.items() if gpu == known), "")


def on_rank(given: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank. given: `trace: false` leaves out the steps under the profiler.

    `seconds` are of single steps, after each of which the host waits for the device; `free` is of one step of
    FREE, after which it waits once, as the loop of training does.
    """
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
    started = clock()
    for _ in range(FREE):
        trainer.step()
    free = (clock() - started) / FREE
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    rank, data = trainer.world.rank, trainer.layout.data
    tokens = config.train.micro_batch_size * config.data.sequence_length * data // trainer.world.size
    result = {"rank": rank, "losses": losses, "peak_bytes": peak, "tokens": tokens}
    result |= {"seconds": seconds, "free": free}
    if given.get("trace", True):
        result["traced"] = profiled(PROFILED, trainer, given["device"] == "cuda")
    trainer.close()
    return result
