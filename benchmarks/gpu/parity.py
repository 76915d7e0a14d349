"""Section `parity`: losses of layouts beside those of one rank on the CPU."""

from dataclasses import dataclass
from typing import Any

from gpu.findings import Machine, Section
from gpu.ranks import Failed, train

CONFIG = "examples/demo.yaml"
STEPS = 5
# A small model, in which every layout is legal, and draws, drops and two losses take part.
MODEL = (
    "data.mock=true",
    "data.workers=0",
    "data.sequence_length=64",
    "model.vocab_size=512",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "moe.expert_ffn_hidden_size=64",
    "moe.router.capacity=per_expert",
    "evaluation.batches=0",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    f"train.steps={STEPS}",
    "optimizer.warmup_steps=1",
    "log.every=1",
    "parallel.precision=fp32",
)
ZERO = "parallel.deepspeed=ds_configs/zero{}_fp32.json"
FP32_TOLERANCE = 1e-4  # relative; a CPU and a GPU sum in other orders
BF16_TOLERANCE = 2e-2
COMPARED = ("train/lm_loss", "train/loss", "train/grad_norm")


@dataclass(frozen=True)
class Layout:
    """A layout and the number of ranks that it needs."""

    name: str
    ranks: int
    overrides: tuple[str, ...]


LAYOUTS = (
    Layout("one rank, ZeRO 0", 1, (ZERO.format(0),)),
    Layout(
        "EP 2 x TP 2, sequence parallel, ZeRO 1",
        4,
        ("parallel.expert=2", "parallel.tensor=2", "parallel.sequence=true", ZERO.format(1)),
    ),
    Layout("EP 4, ZeRO 3", 4, ("parallel.expert=4", ZERO.format(3))),
    Layout("EP 2, ZeRO 1", 2, ("parallel.expert=2", ZERO.format(1))),
    Layout(
        "TP 2, sequence parallel, EP 2, ZeRO 2",
        2,
        ("parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2", ZERO.format(2)),
    ),
    Layout("expert TP 2, ZeRO 3", 2, ("parallel.expert_tensor=2", ZERO.format(3))),
    Layout("one rank, ZeRO 3, full recomputation", 1, (ZERO.format(3), "model.recompute=full")),
    Layout("one rank, ZeRO 1", 1, (ZERO.format(1),)),
    Layout("one rank, ZeRO 2, threshold router", 1, (ZERO.format(2), "moe.router=xmoe_threshold")),
    Layout(
        "one rank, plain kernels", 1, (ZERO.format(0), "model.gpu_kernels=plain", "model.cpu_kernels=plain")
    ),
)
NUM_LAYOUTS = 2


def layouts_for(count: int) -> list[Layout]:
    """Return the layouts that `count` devices are checked with: one rank, then the largest."""
    fitting = [layout for layout in LAYOUTS[1:] if layout.ranks <= count]
    return [LAYOUTS[0], *sorted(fitting, key=lambda layout: -layout.ranks)[: NUM_LAYOUTS - 1]]


def run(machine: Machine, section: Section) -> None:
    """Require every loss, gradient norm and expert load to be that of one rank on the CPU."""
    cpu = Machine("cpu", 1, machine.quick)
    references: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    layouts = layouts_for(machine.count)
    for layout in layouts:
        model = tuple(each for each in layout.overrides if each.startswith("moe."))
        if model not in references:
            references[model] = train(cpu, 1, CONFIG, [*MODEL, *model])
        try:
            found = train(machine, layout.ranks, CONFIG, [*MODEL, *layout.overrides])
        except Failed as error:
            section.add(layout.name, str(error), holds=False)
            continue
        _compare(section, layout.name, references[model], found, FP32_TOLERANCE)
    if not machine.quick:
        bf16 = ["parallel.precision=bf16", "parallel.deepspeed=ds_configs/zero1_bf16.json"]
        reference, found = (train(each, 1, CONFIG, [*MODEL, *bf16]) for each in (cpu, machine))
        _compare(section, "one rank, ZeRO 1, bf16", reference, found, BF16_TOLERANCE, loads=False)


def _compare(
    section: Section,
    name: str,
    reference: list[dict[str, Any]],
    found: list[dict[str, Any]],
    tolerance: float,
    loads: bool = True,
) -> None:
    error = largest_error(reference, found)
    note = f"largest relative difference over {STEPS} steps, at most {tolerance:g}"
    section.add(name, error, holds=error <= tolerance, note=note)
    if loads:
        moved = moved_share(reference, found)
        section.add(
            f"{name}: pairs at another expert", moved, holds=moved <= 0.001, note="at most 0.001 of all"
        )


def largest_error(reference: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
    """Return the largest relative difference of losses and gradient norms.

    It is infinite for unequal numbers of steps.
    """
    if len(reference) != len(found) or not reference:
        return float("inf")
    pairs = zip(reference, found, strict=True)
    return max(abs(b[key] - a[key]) / max(abs(a[key]), 1e-30) for a, b in pairs for key in COMPARED)


def moved_share(reference: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
    """Return the share of (token, expert) pairs that are counted at another expert than in the reference."""
    moved = total = 0
    for a, b in zip(reference, found, strict=False):
        for key in (key for key in a if key.endswith("/load")):
            moved += sum(abs(x - y) for x, y in zip(a[key], b[key], strict=True)) / 2
            total += sum(a[key])
    return moved / total if total else float("inf")
