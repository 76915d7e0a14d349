"""The figures of a simulated step, as a dictionary and as a page."""

from collections import Counter
from typing import Any

from megamoe.apps.plan.assumptions import ASSUMED, OPTIMISTIC, PESSIMISTIC, Assumptions
from megamoe.apps.plan.hardware import GPUS, Gpu
from megamoe.apps.plan.rank import StepCosts
from megamoe.apps.plan.roofline import BOUNDS, Roofline, host_seconds, roofline


def figures(costs: StepCosts) -> dict[str, Any]:
    """Return counts of the step, and its time on every GPU of the table."""
    operators, collectives = costs.counts.operators, costs.counts.collectives
    found: dict[str, Any] = {
        "kernels": sum(total.launches for total in operators.values()),
        "bytes": sum(total.bytes for total in operators.values()),
        "flops": sum(total.flops for total in operators.values()),
        "peak_bytes": costs.peak.bytes,
        "collective_bytes": sum(t.bytes for key, t in collectives.items() if len(key.ranks) > 1),
        "host_waits": (costs.counts.syncs + costs.counts.uploads).total(),
        "parameters": costs.parameters,
        "tokens": costs.tokens,
        "host_seconds": host_seconds(costs, ASSUMED),
        "peak_by_category": costs.peak.by_category,
    }
    for name, gpu in GPUS.items():
        times = roofline(costs, gpu)
        parts = {part: round(time.total * 1e3, 2) for part, time in sorted(times.parts.items())}
        found[name] = {
            "ms": round(times.seconds * 1e3, 2),
            "utilisation": round(times.utilisation, 4),
            "overlapped_ms": round((times.seconds - times.hidden) * 1e3, 2),
            "overlapped_utilisation": round(times.overlapped_utilisation, 4),
            **{case.case: _case(costs, gpu, case) for case in (OPTIMISTIC, PESSIMISTIC)},
            "parts_ms": parts,
        }
    return found


def _case(costs: StepCosts, gpu: Gpu, assumed: Assumptions) -> dict[str, float]:
    """Return milliseconds and utilisation, with overlap."""
    times = roofline(costs, gpu, assumed)
    seconds = times.seconds - times.hidden
    return {"ms": round(seconds * 1e3, 2), "utilisation": round(times.overlapped_utilisation, 4)}


def page(costs: StepCosts, gpu: str, config: str, ranks: int) -> str:
    """Return what was simulated, the assumptions, time by part, memory, collectives and waits."""
    times = roofline(costs, GPUS[gpu])
    card = GPUS[gpu]
    lines = [f"{config} on {ranks} x {card.name}; the fullest rank has {costs.load:g} times the mean load"]
    lines += [f"{costs.parameters / 1e6:,.1f} M parameters and {costs.tokens:,} tokens on this rank", ""]
    lines += ["assumed, not measured:"]
    lines += [
        f"  peaks: bf16 {card.bf16 / 1e12:g}, fp32 {card.fp32 / 1e12:g} TFLOP/s; "
        f"memory {card.memory / 1e12:g} TB/s; NVLink {card.nvlink / 1e9:g}, "
        f"network {card.network / 1e9:g} GB/s one way"
    ]
    lines += [f"  {line}" for line in ASSUMED.lines()]
    cases = [
        f"{each.case}: {found['ms']:.1f} ms, {found['utilisation']:.1%}"
        for each in (OPTIMISTIC, PESSIMISTIC)
        for found in [_case(costs, card, each)]
    ]
    lines += ["", *_parts(times, cases), "", *_memory(costs), "", *_collectives(costs), ""]
    waits = (costs.counts.syncs + costs.counts.uploads).most_common()
    lines += ["the host waits: " + (", ".join(f"{name} {count}" for name, count in waits) or "never")]
    return "\n".join(lines)


def _parts(times: Roofline, cases: list[str]) -> list[str]:
    heads = " ".join(f"{bound:>8}" for bound in BOUNDS)
    lines = [f"{'part':22} {'ms':>8} {heads}  {'kernels':>7} {'GB':>7} {'TFLOP':>7}  bound by"]
    for name, part in sorted(times.parts.items(), key=lambda item: -item[1].total):
        row = " ".join(f"{part.seconds[bound] * 1e3:8.2f}" for bound in BOUNDS)
        counts = f"{part.launches:7} {part.bytes / 1e9:7.2f} {part.flops / 1e12:7.2f}"
        lines.append(f"{name:22} {part.total * 1e3:8.2f} {row}  {counts}  {part.bound}")
    total = f"{times.seconds * 1e3:.1f} ms a step, model FLOP utilisation {times.utilisation:.1%}"
    shorter = f"{(times.seconds - times.hidden) * 1e3:.1f} ms, {times.overlapped_utilisation:.1%}"
    beside = (
        f"with the {times.hidden * 1e3:.1f} ms of collectives that run beside the backward pass: {shorter}"
    )
    return [*lines, total, *([beside] if times.hidden else []), *cases]


def _memory(costs: StepCosts) -> list[str]:
    peak = costs.peak
    shown = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in _largest(peak.by_category))
    kept = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in _largest(peak.activations_by_part))
    return [f"peak memory {peak.bytes / 1e9:.2f} GB: {shown}", f"activations by part, GB: {kept}"]


def _largest(sizes: dict[str, int]) -> list[tuple[str, int]]:
    return [(name, size) for name, size in Counter(sizes).most_common() if size >= 5e6]


def _collectives(costs: StepCosts) -> list[str]:
    lines = ["collectives of more than one rank:"]
    for key, total in costs.counts.collectives.items():
        if len(key.ranks) > 1:
            name = f"{key.part}, {key.phase}: {key.kind}"
            lines.append(
                f"  {name:48} {len(key.ranks):4} ranks {total.calls:5} calls {total.bytes / 1e6:9.1f} MB"
            )
    return lines
