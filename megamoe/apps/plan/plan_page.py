"""A plan as a page and as JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from megamoe.apps.plan.counter import CollectiveTotal
from megamoe.apps.plan.hardware import Topology
from megamoe.apps.plan.memory import ACTIVATIONS, BATCH, GRADIENTS, OPTIMIZER, PARAMETERS, TEMPORARY
from megamoe.apps.plan.plan import CHECKPOINT_BYTES, RESERVED, Plan
from megamoe.config.messages import differences_told

GB = 1e9
LINKS = ("bytes", "inside", "between")  # of a row of collectives
# The columns of the memory; what stays from step to step comes first.
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, BATCH, ACTIVATIONS, TEMPORARY)


# Attributes of a plan that its JSON has under their names.
RECORDED = (
    *("micro_batches", "load", "fits", "usable_bytes", "peak_bytes", "checkpoint_bytes"),
    *("step_seconds", "tokens_per_second", "run_seconds"),
)


def page(plan: Plan) -> str:
    """Return the page of `tools/plan.py`."""
    head, differences = _head(plan), differences_told(plan.config.differences)
    checkpoint = [f"a checkpoint: {plan.checkpoint_bytes / GB:,.1f} GB"]
    figures = [_stages(plan), _memory(plan), _collectives(plan), _time(plan)]
    blocks = filter(None, [head, differences, *figures, checkpoint, _assumptions(plan)])
    return "\n\n".join(map("\n".join, blocks))


def _head(plan: Plan) -> list[str]:
    cluster, layout, numbers = plan.cluster, plan.run.plan.layout, plan.figures.numbers
    recompute = plan.config.model.recompute
    recomputed = recompute if isinstance(recompute, str) else ", ".join(recompute) or "none"
    sizes = {"pipeline": layout.pipeline, "context": layout.context}
    parts = "".join(f"{name} {size}, " for name, size in sizes.items() if size > 1)
    return [
        f"{plan.config.name}: {plan.size.total / 1e9:,.2f} B parameters, "
        f"{plan.size.active / 1e9:,.2f} B active, "
        f"on {cluster.nodes} x {cluster.gpus_per_node} {cluster.gpu.name}",
        f"{parts}tensor {layout.tensor}, sequence {'on' if plan.config.parallel.sequence else 'off'}, "
        f"expert {layout.expert}, expert_tensor {layout.expert_tensor}, data {layout.data}, "
        f"ZeRO {plan.run.plan.stage}, {plan.run.plan.precision}, recompute {recomputed}",
        f"{plan.micro_batches} micro batches of {plan.config.train.micro_batch_size} sequences of "
        f"{plan.config.data.sequence_length} tokens a step; "
        f"{numbers['parameters'] / 1e6:,.1f} M parameters on a rank; expert load {plan.load:g}",
        *([] if plan.config.data.mock else [f"data: {plan.run.data_source}"]),
    ]


def stage_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return a dictionary for each pipeline stage; none without stages.

    blocks: their numbers from 1, by chunk. alive: micro batches whose activations it holds at most. bytes:
    its peak. forward, backward: seconds of one micro batch. busy: the share of the passes' time that it
    computes.
    """
    if plan.pipeline is None:
        return []
    timeline = plan.pipeline.timeline
    return [
        {
            "stage": stage.number,
            "blocks": [[part.start + 1, part.stop] for part in stage.chunks],
            "parameters": stage.figures.numbers["parameters"],
            "alive": stage.alive,
            "bytes": stage.figures.peak_bytes,
            "forward": stage.figures.numbers["forward"],
            "backward": stage.figures.numbers["backward"],
            "busy": busy / timeline.total,
        }
        for stage, busy in zip(plan.pipeline.stages, timeline.busy, strict=True)
    ]


def _stages(plan: Plan) -> list[str]:
    if plan.pipeline is None:
        return []
    pipeline, chunks = plan.pipeline, plan.config.parallel.pipeline_chunks
    order = f"interleaved 1F1B with {chunks} chunks" if chunks > 1 else "1F1B"
    heads = ("M parameters", "alive", "peak GB", "forward ms", "backward ms", "busy")
    lines = [
        f"pipeline stages, {order}: idle {pipeline.timeline.idle:.1%} of the passes' time; a send to the "
        f"next stage takes {pipeline.send_seconds * 1e3:.2f} ms, what follows the passes "
        f"{pipeline.once * 1e3:,.1f} ms",
        f"  {'stage':>5}  {'blocks':24}" + "".join(f"{head:>14}" for head in heads),
    ]
    for row in stage_rows(plan):
        blocks = ", ".join(f"{first}-{last}" for first, last in row["blocks"])
        lines.append(
            f"  {row['stage']:5}  {blocks:24}{row['parameters'] / 1e6:14,.1f}{row['alive']:14g}"
            f"{row['bytes'] / GB:14.2f}{row['forward'] * 1e3:14.2f}{row['backward'] * 1e3:14.2f}"
            f"{row['busy']:14.1%}"
        )
    lines.append(
        f"  memory, collectives and parts of the time below are those of stage {pipeline.fullest.number}"
    )
    return lines


def _memory(plan: Plan) -> list[str]:
    peak, usable = plan.peak_bytes / GB, plan.usable_bytes / GB
    verdict = f"fits: {usable - peak:.1f} GB are left"
    if not plan.fits:
        verdict = f"DOES NOT FIT: {peak - usable:.1f} GB too much; {_way_out(plan)}"
    lines = [f"memory of a rank, GB: peak {peak:.2f} of {usable:.1f} usable; {verdict}"]
    phases = plan.figures.phase_peaks()
    there = {name for _, name in plan.figures.peaks}
    names = [name for name in CATEGORIES if name in there]
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
        ways = "train.in_flight=1" if plan.config.train.in_flight == 2 else ways
        smaller = " or a smaller train.micro_batch_size" if plan.config.train.micro_batch_size > 1 else ""
        return f"most of it is {largest}; set {ways}{smaller}"
    return f"most of it is {largest}; raise parallel.expert, parallel.tensor or the ZeRO stage"


def _collectives(plan: Plan) -> list[str]:
    heads = [f"{head:>11}" for head in ("MB given", "MB in node", "MB between")]
    lines = ["collectives of a rank in a step:"]
    lines.append(f"  {'what':44} {'ranks':>6} {'of them':>11} {'calls':>8} {' '.join(heads)} {'ms':>9}")
    rows = collective_rows(plan)
    for row in rows:
        what = f"{row['part']}, {row['phase']}: {row['kind']}{', beside' if row['beside'] else ''}"
        group = f"{row['ranks']:6} {row['group']:>11}"
        lines.append(f"  {what:44} {group} {row['calls']:8,} {_sizes(row)} {row['ms']:9.2f}")
    total = {key: sum(row[key] for row in rows) for key in ("calls", "ms", *LINKS)}
    lines.append(f"  {'all':63} {total['calls']:8,} {_sizes(total)} {total['ms']:9.2f}")
    return lines


def _sizes(row: Mapping[str, Any]) -> str:
    return " ".join(f"{row[key] / 1e6:11,.1f}" for key in LINKS)


def collective_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return a dictionary for each kind of collective, group and part of the step.

    ranks: their number. group: their numbers, see `shown_ranks`. beside: the code goes on, and waits later.
    bytes: given to the collective. inside, between: sent in the node, and to other nodes.
    """
    topology, rows = Topology(plan.cluster.gpus_per_node), []
    for key, calls in plan.figures.calls.items():
        total = CollectiveTotal(round(calls), round(plan.figures.bytes[key]))
        inside, between = topology.sent(key, total)
        rows.append(
            {
                "part": key.part,
                "phase": key.phase,
                "kind": key.kind,
                "beside": key.is_async,
                "ranks": len(key.ranks),
                "group": shown_ranks(key.ranks),
                "calls": total.calls,
                "bytes": total.bytes,
                "inside": inside,
                "between": between,
                "ms": topology.seconds(key, total, plan.cluster.gpu, plan.cluster.models.likely) * 1e3,
            }
        )
    return rows


def shown_ranks(ranks: Sequence[int]) -> str:
    """Return `0-7` for neighbours, `0,8..248` for equal distances, else the first of them."""
    steps = {after - before for before, after in pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1:
        return f"{ranks[0]}-{ranks[-1]}" if steps == {1} else f"{ranks[0]},{ranks[1]}..{ranks[-1]}"
    return ",".join(map(str, ranks[:3])) + (".." if len(ranks) > 3 else "")


def _time(plan: Plan) -> list[str]:
    figures = plan.figures
    lines = [f"time of a step: {plan.step_seconds * 1e3:,.1f} ms, {plan.tokens_per_second:,.0f} tokens/s"]
    lines[0] += f", model FLOP utilisation {plan.utilisation:.1%}"
    for case in ("optimistic", "pessimistic"):
        seconds = plan.seconds_of_case(case)
        speed, share = plan.step_seconds / seconds * plan.tokens_per_second, plan.step_seconds / seconds
        lines.append(
            f"  {case}: {seconds * 1e3:,.1f} ms, {speed:,.0f} tokens/s, {share * plan.utilisation:.1%}"
        )
    if plan.pipeline is None:
        lines.append(
            f"  without overlap of collectives and the backward pass: {figures.step_seconds * 1e3:,.1f} ms"
        )
    lines.append("  ms by part: " + _listed(figures.seconds, 1e-3, 0.05))
    flops, model = figures.numbers["flops"], figures.numbers["model_flops"]
    lines.append(f"  TFLOP of a rank: {flops / 1e12:,.1f}, of the model alone {model / 1e12:,.1f}")
    hours = plan.run_seconds / 3600
    gpu_hours = hours * plan.cluster.ranks
    sizes = [size for size, _ in plan.run.schedule.spans(plan.run.steps)]
    grows = f" of {sizes[0]:,} to {sizes[-1]:,} sequences" if len({*sizes}) > 1 else ""
    lines.append(f"  {plan.run.steps:,} steps{grows}: {hours:,.3g} hours, {gpu_hours:,.3g} GPU hours")
    return lines


def _assumptions(plan: Plan) -> list[str]:
    gpu, lines = plan.cluster.gpu, ["assumed, not measured:"]
    lines.append(
        f"  peaks: bf16 {gpu.bf16 / 1e12:g}, fp32 {gpu.fp32 / 1e12:g} TFLOP/s; "
        f"memory {gpu.memory / 1e12:g} TB/s, {gpu.capacity / GB:g} GB; inside a node {gpu.nvlink / GB:g}, "
        f"between nodes {gpu.network / GB:g} GB/s a GPU, one way"
    )
    lines += [f"  {line}" for line in plan.cluster.models.likely.lines()]
    lines.append("  collectives: rings, one for each GPU of a node; all-to-alls use both links at once")
    if any(key.is_async for key in plan.figures.calls):
        lines.append("  collectives `beside` and the backward pass run together, see `hidden`")
    if plan.run.plan.layout.expert > 1:
        lines.append(
            f"  expert load {plan.load:g}: this rank's experts get so many times the mean rows, as many from "
            "each rank, and the other ranks' experts as many as each other"
        )
    if plan.config.train.in_flight == 2:
        lines.append(
            "  two micro batches in flight: the memory is that of one after the other and the activations of "
            "one more"
        )
    if plan.pipeline is not None:
        lines.append(
            "  stages: what is sent runs beside the passes; blocks of a stage are alike; stages of the same "
            "kinds of blocks are simulated once, with two micro batches under way at most"
        )
    lines.append("  all ranks are as fast as the first, which is planned")
    lines.append(f"  {RESERVED:.0%} of the memory are for CUDA's context, NCCL and fragmentation")
    lines.append(
        f"  a checkpoint has the weights and {CHECKPOINT_BYTES} bytes a parameter of optimiser state"
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
        "differences": plan.config.differences,
        **{name: getattr(plan, name) for name in RECORDED},
        "states": dict(figures.states),
        "phases": {
            phase: {name: size for (of, name), size in figures.peaks.items() if of == phase}
            for phase in figures.phase_peaks()
        },
        "collectives": collective_rows(plan),
        "stages": stage_rows(plan),
        "idle": 0.0 if plan.pipeline is None else plan.pipeline.timeline.idle,
        "optimistic_step_seconds": plan.seconds_of_case("optimistic"),
        "pessimistic_step_seconds": plan.seconds_of_case("pessimistic"),
        "serial_step_seconds": figures.step_seconds,
        "seconds_by_part": dict(figures.seconds),
        "model_flop_utilisation": plan.utilisation,
        "flops": figures.numbers["flops"],
        "steps": plan.run.steps,
        "assumptions": _assumptions(plan)[1:],
    }
