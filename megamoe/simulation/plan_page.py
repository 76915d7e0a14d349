"""A plan as a page, as JSON, and as a picture of the memory by phase (SVG)."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from megamoe.simulation.counter import CollectiveTotal
from megamoe.simulation.hardware import ASSUMED
from megamoe.simulation.links import Topology
from megamoe.simulation.plan import CHECKPOINT_BYTES, RESERVED, Plan

GB = 1e9
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb")
WIDTH, ROW, LEFT = 640, 36, 110  # of the picture, in pixels


def page(plan: Plan) -> str:
    """Return the page of `tools/plan.py`."""
    blocks = (_head, _memory, _collectives, _time, _checkpoint, _assumptions)
    return "\n\n".join("\n".join(block(plan)) for block in blocks)


def _head(plan: Plan) -> list[str]:
    cluster, layout, numbers = plan.cluster, plan.run.plan.layout, plan.figures.numbers
    return [
        f"{plan.config.name}: {plan.size.total / 1e9:,.2f} B parameters, "
        f"{plan.size.active / 1e9:,.2f} B active, "
        f"on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}",
        f"tensor {layout.tensor}, sequence {'on' if plan.config.parallel.sequence else 'off'}, "
        f"expert {layout.expert}, expert_tensor {layout.expert_tensor}, data {layout.data}, "
        f"ZeRO {plan.run.plan.stage}, {plan.run.plan.precision}, recompute {plan.config.model.recompute}",
        f"{plan.micro_batches} micro batches of {plan.config.train.micro_batch_size} sequences of "
        f"{plan.config.data.sequence_length} tokens a step; "
        f"{numbers['parameters'] / 1e6:,.1f} M parameters on a rank; expert load {plan.load:g}",
    ]


def _memory(plan: Plan) -> list[str]:
    peak, usable = plan.peak_bytes / GB, plan.usable_bytes / GB
    verdict = f"fits: {usable - peak:.1f} GB are left"
    if not plan.fits:
        verdict = f"DOES NOT FIT: {peak - usable:.1f} GB too much; {_way_out(plan)}"
    lines = [f"memory of a rank, GB: peak {peak:.2f} of {usable:.1f} usable; {verdict}"]
    phases = plan.figures.phase_peaks()
    names = sorted({name for _, name in plan.figures.peaks})
    lines.append(f"  {'phase':12}" + "".join(f"{name:>18}" for name in [*names, "peak"]))
    for phase, total in phases.items():
        sizes = [plan.figures.peaks.get((phase, name), 0.0) for name in names]
        lines.append(f"  {phase:12}" + "".join(f"{size / GB:18.3f}" for size in [*sizes, total]))
    states = ", ".join(f"{name} {size:,.0f}" for name, size in plan.figures.states.items())
    lines.append(f"  states, bytes: {states}")
    host = sum(size for name, size in plan.figures.states.items() if name.endswith("on the host"))
    if host:
        ranks = plan.cluster.gpus_per_node
        lines.append(f"  offloaded to the host, GB: {host * ranks / GB:.2f} of the {ranks} ranks of a node")
    kept = {
        part: size for (phase, part), size in plan.figures.kept.items() if phase == plan.figures.peak_phase
    }
    lines.append("  activations at the peak: " + _listed(kept, GB, 0.005))
    return lines


def _way_out(plan: Plan) -> str:
    """Return what to change, by what takes most of the memory."""
    phase, peaks = plan.figures.peak_phase, plan.figures.peaks
    sizes = {name: size for (of, name), size in peaks.items() if of == phase}
    largest = max(sizes, key=sizes.__getitem__)
    if largest in ("activations", "temporary"):
        ways = "model.recompute=full" if plan.config.model.recompute != "full" else "parallel.tensor"
        smaller = " or a smaller train.micro_batch_size" if plan.config.train.micro_batch_size > 1 else ""
        return f"most of it is {largest}; set {ways}{smaller}"
    return f"most of it is {largest}; raise parallel.expert, parallel.tensor or the ZeRO stage"


def _collectives(plan: Plan) -> list[str]:
    lines = ["collectives of a rank in a step:"]
    lines.append(
        f"  {'what':44} {'ranks':>6} {'calls':>8} "
        f"{'MB given':>11} {'MB in node':>11} {'MB between':>11} {'ms':>9}"
    )
    for row in collective_rows(plan):
        sizes = " ".join(f"{row[key] / 1e6:11,.1f}" for key in ("bytes", "inside", "between"))
        lines.append(f"  {row['what']:44} {row['ranks']:6} {row['calls']:8,.0f} {sizes} {row['ms']:9.2f}")
    return lines


def collective_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return a dictionary for each kind of collective, group and part of the step."""
    topology, rows = Topology(plan.cluster.gpus_per_node), []
    for key, calls in plan.figures.calls.items():
        total = CollectiveTotal(round(calls), round(plan.figures.bytes[key]))
        sent = topology.sent(key, total)
        seconds = topology.seconds(key, total, plan.cluster.gpu, ASSUMED)
        rows.append(
            {
                "what": f"{key.part}, {key.phase}: {key.kind}{', beside' if key.is_async else ''}",
                "ranks": len(key.ranks),
                "first_ranks": list(key.ranks[:4]),
                "calls": total.calls,
                "bytes": total.bytes,
                "inside": sent.inside,
                "between": sent.between,
                "ms": seconds * 1e3,
            }
        )
    return rows


def _time(plan: Plan) -> list[str]:
    figures = plan.figures
    lines = [f"time of a step: {plan.step_seconds * 1e3:,.1f} ms, {plan.tokens_per_second:,.0f} tokens/s"]
    lines[0] += f", model FLOP utilisation {plan.utilisation:.1%}"
    lines.append(
        f"  without overlap of collectives and the backward pass: {figures.step_seconds * 1e3:,.1f} ms"
    )
    lines.append("  ms by part: " + _listed(figures.seconds, 1e-3, 0.05))
    flops, model = figures.numbers["flops"], figures.numbers["model_flops"]
    lines.append(f"  TFLOP of a rank: {flops / 1e12:,.1f}, of the model alone {model / 1e12:,.1f}")
    hours = plan.run_seconds / 3600
    gpu_hours = hours * plan.cluster.ranks
    lines.append(f"  {plan.run.steps:,} steps: {hours:,.3g} hours, {gpu_hours:,.3g} GPU hours")
    return lines


def _checkpoint(plan: Plan) -> list[str]:
    seconds = plan.checkpoint_bytes / (plan.cluster.disk * plan.cluster.nodes)
    return [f"a checkpoint: {plan.checkpoint_bytes / GB:,.1f} GB, written in {seconds:,.0f} s"]


def _assumptions(plan: Plan) -> list[str]:
    gpu, lines = plan.cluster.gpu, ["assumed, not measured:"]
    lines.append(
        f"  peaks: bf16 {gpu.bf16 / 1e12:g}, fp32 {gpu.fp32 / 1e12:g} TFLOP/s; "
        f"memory {gpu.memory / 1e12:g} TB/s, {gpu.capacity / GB:g} GB; inside a node {gpu.nvlink / GB:g}, "
        f"between nodes {gpu.network / GB:g} GB/s a GPU, one way"
    )
    lines += [f"  {line}" for line in ASSUMED.lines() if not line.startswith("of the links")]
    lines.append(f"  of the links: {ASSUMED.link:.0%}, and {ASSUMED.collective_s * 1e6:g} us to start")
    lines.append("  collectives: rings, one for each GPU of a node; all-to-alls use both links at once")
    lines.append(f"  {RESERVED:.0%} of the memory are for CUDA's context, NCCL and fragmentation")
    lines.append(
        f"  a checkpoint has the weights and {CHECKPOINT_BYTES} bytes a parameter of optimiser state; "
        f"each node writes {plan.cluster.disk / GB:g} GB/s"
    )
    lines.append("  evaluation, checkpoints, start-up, data loading and failures take no time")
    lines += [f"  {line}" for line in plan.changes]
    if plan.simulated != [plan.blocks]:
        lines.append(
            f"  models of {', '.join(map(str, plan.simulated))} blocks were simulated, and the "
            f"{plan.blocks} blocks extrapolated: blocks of one kind cost the same "
            "(--all-blocks simulates all)"
        )
    if plan.run.plan.offload.optimizer != "none":
        lines.append("  offload: the update on the host and its copies over PCIe take no time")
    if plan.config.model.architecture != "decoder":
        lines.append("  batches of full sequences, without padding")
    if plan.micro_batches > 3:
        lines.append(
            f"  3 micro batches were simulated; of the {plan.micro_batches}, the others are as the second"
        )
    return lines


def _listed(sizes: Mapping[str, float], unit: float, least: float) -> str:
    shown = [(name, size / unit) for name, size in Counter(sizes).most_common()]
    return ", ".join(f"{name} {size:.2f}" for name, size in shown if size >= least) or "none"


def record(plan: Plan) -> dict[str, Any]:
    """Return the plan for JSON; sizes in bytes, times in seconds."""
    figures = plan.figures
    return {
        "name": plan.config.name,
        "gpu": plan.cluster.gpu.name,
        "nodes": plan.cluster.nodes,
        "gpus_per_node": plan.cluster.gpus_per_node,
        "parameters": plan.size.total,
        "active_parameters": plan.size.active,
        "micro_batches": plan.micro_batches,
        "load": plan.load,
        "fits": plan.fits,
        "usable_bytes": plan.usable_bytes,
        "peak_bytes": plan.peak_bytes,
        "states": dict(figures.states),
        "phases": {
            phase: {name: size for (of, name), size in figures.peaks.items() if of == phase}
            for phase in figures.phase_peaks()
        },
        "collectives": collective_rows(plan),
        "step_seconds": plan.step_seconds,
        "serial_step_seconds": figures.step_seconds,
        "seconds_by_part": dict(figures.seconds),
        "tokens_per_second": plan.tokens_per_second,
        "model_flop_utilisation": plan.utilisation,
        "flops": figures.numbers["flops"],
        "steps": plan.run.steps,
        "run_seconds": plan.run_seconds,
        "checkpoint_bytes": plan.checkpoint_bytes,
        "assumptions": _assumptions(plan)[1:],
    }


def picture(plan: Plan) -> str:
    """Return an SVG: a bar for each phase, of the categories of memory at its peak, and the device's size."""
    phases = plan.figures.phase_peaks()
    names = sorted({name for _, name in plan.figures.peaks})
    scale = WIDTH / max(*phases.values(), plan.cluster.gpu.capacity)
    height = ROW * (len(phases) + 2)
    texts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}"']
    texts[0] += ' font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    for row, phase in enumerate(phases):
        x, y = float(LEFT), ROW * row + 8
        texts.append(f'<text x="4" y="{y + 18}">{phase} {phases[phase] / GB:.1f} GB</text>')
        for name, colour in zip(names, COLOURS, strict=False):
            width = plan.figures.peaks.get((phase, name), 0.0) * scale
            texts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="24" fill="{colour}"/>')
            x += width
    edge, bottom = LEFT + plan.usable_bytes * scale, ROW * len(phases) + 8
    texts.append(f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="0" y2="{bottom}" stroke="black"/>')
    texts.append(
        f'<text x="{edge - 100:.1f}" y="{bottom + 10}">{plan.usable_bytes / GB:.1f} GB usable</text>'
    )
    for place, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
        x, y = 8 + place * 120, bottom + 28
        texts.append(f'<rect x="{x}" y="{y - 10}" width="10" height="10" fill="{colour}"/>')
        texts.append(f'<text x="{x + 14}" y="{y}">{name}</text>')
    return "\n".join([*texts, "</svg>\n"])
