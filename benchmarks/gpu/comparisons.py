"""Sections `layer` and `step`: our MoE layer and training step beside those of other libraries."""

import json
import statistics
import tempfile
from typing import Any

from gpu.findings import Machine, Section
from gpu.ranks import start

# Tokens, hidden size, FFN size, experts and choices.
LAYER_SHAPES = {"cuda": ("16384,1024,1024,64,4", "8192,4096,14336,8,2"), "cpu": ("512,64,64,8,2",)}
DTYPES = ("bf16", "fp32")
# Not transformers' batched product, which gathers a weight for every token.
CANDIDATES = "ours,limit,dense,hf_eager,hf_grouped_mm,deepspeed,megatron_sequential,megatron_grouped"
ROUNDS = 10
TIMEOUT_S = 150.0


def run_layer(machine: Machine, section: Section) -> None:
    """Report times, and our layer's ratio to each other one; require our layer to compute what it should."""
    shapes = LAYER_SHAPES["cpu"] if machine.quick else LAYER_SHAPES[machine.device]
    rounds = 2 if machine.quick else ROUNDS
    for shape in shapes:
        arguments = ["--shape", shape, "--dtypes", ",".join(DTYPES[:1] if machine.quick else DTYPES)]
        arguments += ["--candidates", CANDIDATES]
        for case in _measured(machine, "moe_layer.py", [*arguments, "--rounds", str(rounds)])["cases"]:
            _report_layer(section, f"{shape}, {case['dtype']}", case["candidates"])


def _report_layer(section: Section, name: str, candidates: dict[str, Any]) -> None:
    for candidate, found in candidates.items():
        if "not measured" in found:
            holds = False if candidate == "ours" else None
            section.add(f"{name}: {candidate}", found["not measured"], holds=holds)
            continue
        both = found["both"]
        note = "forward and backward"
        if both["ours_over"]:
            note += f"; ours over it {both['ours_over']['median']:.3f}"
        holds = True if candidate == "ours" else None
        section.add(f"{name}: {candidate}", 1000 * both["median"], "ms", holds, note)


def run_step(machine: Machine, section: Section) -> None:
    """Report a step of our MoE model, of the dense one of equal FLOPs, and of transformers' Mixtral."""
    rounds = 2 if machine.quick else ROUNDS
    arguments = ["--shape", "demo" if machine.quick else "large", "--rounds", str(rounds)]
    precisions = {"fp32": "zero0_fp32"} if machine.quick else {"bf16": "zero1_bf16", "fp32": "zero0_fp32"}
    for precision, file in precisions.items():
        settings = [f"parallel.precision={precision}", f"parallel.deepspeed=ds_configs/{file}.json"]
        steps = _measured(machine, "train_step.py", [*arguments, *settings])["steps"]
        for candidate, found in steps["candidates"].items():
            name = f"{precision}: {candidate}"
            if "not measured" in found:
                section.add(name, found["not measured"])
                continue
            seconds = statistics.median(found["seconds"]["total"])
            section.add(name, 1000 * seconds, "ms", note=f"{steps['tokens'] / seconds:,.0f} tokens/s")


def _measured(machine: Machine, benchmark: str, arguments: list[str]) -> Any:
    """Return what a benchmark writes as JSON. Its bars are a CPU's and are not looked at."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [f"benchmarks/{benchmark}", *arguments, "--json", file.name]
        start(machine, 1, command, machine.limit(TIMEOUT_S), accepted=(0, 1))
        return json.load(file)
