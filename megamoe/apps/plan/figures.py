"""The figures of a simulated step, extrapolated from fewer blocks, as blocks of one kind cost the same."""

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from megamoe.apps.plan.assumptions import Assumptions
from megamoe.apps.plan.counter import STAGES, CollectiveKey, Counts
from megamoe.apps.plan.hardware import Gpu, Topology
from megamoe.apps.plan.memory import GRADIENTS, OPTIMIZER, PARAMETERS
from megamoe.apps.plan.rank import StepCosts
from megamoe.apps.plan.roofline import WAITING, beside_seconds, host_seconds, roofline
from megamoe.config import RunConfig
from megamoe.config.layer_kinds import group_layers
from megamoe.config.moe_schema import LayerGroupConfig
from megamoe.config.schema import GroupLayersConfig, GroupStackConfig, LayersConfig, StackLayersConfig
from megamoe.config.shapes import stacks, window_of

VOCABULARY = "vocabulary and loss"
FORWARD_VOCABULARY, BACKWARD_VOCABULARY = "forward, vocabulary", "backward, vocabulary"


@dataclass(frozen=True)
class Figures:
    """Numbers by name, in each mapping for one step of one rank.

    numbers: `parameters`, `tokens`, `model_flops`, `flops`, `kernels`, `waits`, `host` (seconds of its
    calls), `backward_seconds` and `overlapped` (what may be hidden of the seconds of
    `roofline.beside_seconds`), `optimistic` and `pessimistic` (seconds of the step; `host, optimistic`: of
    its calls); of one micro batch, `forward` and `backward` (seconds of its passes), FORWARD_VOCABULARY and
    BACKWARD_VOCABULARY (of these, of the embedding, the output layer and the loss), `kept` (bytes of its
    activations between the two) and `sent` (bytes to one other stage).
    states: bytes by category, gradients as the backward pass leaves them. seconds: by part. calls, bytes: of
    collectives. peaks: by (phase, category), bytes when it holds most. kept: activations at the peak by
    (phase, part).
    """

    numbers: Mapping[str, float]
    states: Mapping[str, float]
    seconds: Mapping[str, float]
    calls: Mapping[CollectiveKey, float]
    bytes: Mapping[CollectiveKey, float]
    peaks: Mapping[tuple[str, str], float]
    kept: Mapping[tuple[str, str], float]

    @property
    def step_seconds(self) -> float:
        """Everything one after the other."""
        return sum(self.seconds.values())

    @property
    def overlapped_seconds(self) -> float:
        """Without the collectives that run beside the backward pass."""
        return self.step_seconds - min(self.numbers["backward_seconds"], self.numbers["overlapped"])

    def phase_peaks(self) -> dict[str, float]:
        """Return the most bytes that each phase holds at one time."""
        found: dict[str, float] = defaultdict(float)
        for (phase, _), size in self.peaks.items():
            found[phase] += size
        return dict(found)

    @property
    def peak_phase(self) -> str:
        """The phase that holds most."""
        peaks = self.phase_peaks()
        return max(peaks, key=peaks.__getitem__)

    @property
    def peak_bytes(self) -> float:
        """The most that the tensors of a rank take."""
        return max(self.phase_peaks().values())


@dataclass(frozen=True)
class Models:
    """The GPU, its nodes, and the assumptions of the likely case and of those that bound it."""

    gpu: Gpu
    topology: Topology
    likely: Assumptions
    bounds: tuple[Assumptions, ...]


def figures_of(costs: StepCosts, models: Models) -> Figures:
    """Return the figures of a step that was simulated whole."""
    gpu, topology, assumed = models.gpu, models.topology, models.likely
    times = roofline(costs, gpu, assumed, topology.seconds)
    backward_seconds, overlapped = beside_seconds(costs, gpu, assumed, topology.seconds)
    bounds = [(each, roofline(costs, gpu, each, topology.seconds)) for each in models.bounds]
    counts = costs.counts
    collectives = sum(total.calls for key, total in counts.collectives.items() if key.part != STAGES)
    many = {key: total for key, total in counts.collectives.items() if len(key.ranks) > 1}
    return Figures(
        numbers={
            "parameters": costs.parameters,
            "tokens": costs.tokens,
            "model_flops": times.model_flops,
            "flops": sum(total.flops for total in counts.operators.values()),
            "kernels": sum(total.launches for total in counts.operators.values()) + collectives,
            "waits": counts.waits.total(),
            "host": host_seconds(counts, assumed),
            "backward_seconds": assumed.hidden * backward_seconds,
            "overlapped": assumed.hidden * overlapped,
            **{each.case: other.seconds - other.hidden for each, other in bounds},
            **{f"host, {each.case}": host_seconds(counts, each) for each, _ in bounds},
        },
        states={
            PARAMETERS: costs.parameter_bytes,
            GRADIENTS: costs.gradient_bytes,
            OPTIMIZER: costs.optimizer_bytes,
            **{f"{name} on the host": size for name, size in costs.host.items()},
        },
        seconds=times.parts,
        calls={key: total.calls for key, total in many.items()},
        bytes={key: total.bytes for key, total in many.items()},
        peaks={
            (phase, name): size
            for phase, peak in costs.peaks.items()
            for name, size in peak.by_category.items()
        },
        kept={
            (phase, part): size
            for phase, peak in costs.peaks.items()
            for part, size in peak.activations_by_part.items()
        },
    )


def with_micro_batches(costs: StepCosts, models: Models, micro_batches: int) -> Figures:
    """Return the figures of a step of more micro batches than the simulated three, all like the second one.

    Without pipeline stages memory does not depend on their number, from the second one on.
    """
    whole = figures_of(costs, models)
    middle, both = costs.middle(), Counts()
    for counts in middle.values():
        both.add(counts)
    passes = {
        each.forward: figures_of(replace(costs, counts=counts), models) for each, counts in middle.items()
    }
    further = figures_of(replace(costs, counts=both), models)
    found = combined([(1, whole), (micro_batches - costs.micro_batches, further)])
    sent = [
        total.bytes / total.calls
        for key, total in costs.counts.collectives.items()
        if key.part == STAGES and total.calls
    ]
    numbers = {
        "tokens": costs.tokens / costs.micro_batches * micro_batches,
        "parameters": whole.numbers["parameters"],
        "forward": passes[True].step_seconds,
        "backward": passes[False].step_seconds,
        FORWARD_VOCABULARY: passes[True].seconds.get(VOCABULARY, 0.0),
        BACKWARD_VOCABULARY: passes[False].seconds.get(VOCABULARY, 0.0),
        "kept": costs.kept_bytes,
        "sent": max(sent, default=0.0),
    }
    return replace(
        found, states=whole.states, peaks=whole.peaks, kept=whole.kept, numbers={**found.numbers, **numbers}
    )


def combined(terms: Iterable[tuple[float, Figures]]) -> Figures:
    """Return the sum of figures, each with its factor, and no negative size of memory.

    No step is shorter than the host's calls. A part of a model may have shown nothing of that: the device
    works long enough on the vocabulary.
    """
    totals: dict[str, dict[Any, float]] = {each.name: defaultdict(float) for each in fields(Figures)}
    for factor, figures in terms:
        for name, total in totals.items():
            for key, value in getattr(figures, name).items():
                total[key] += factor * value
    for name in ("peaks", "kept"):  # the moments of the peaks may differ a little between the models
        totals[name] = {key: max(0.0, size) for key, size in totals[name].items()}
    numbers, found = totals["numbers"], Figures(**totals)
    totals["seconds"][WAITING] += max(0.0, numbers["host"] - found.overlapped_seconds)
    for case in ("optimistic", "pessimistic"):
        numbers[case] = max(numbers[case], numbers[f"host, {case}"])
    return found


SIMULATED = 1  # blocks of each kind
PREDICTION = "prediction"  # the stack whose blocks are always simulated all


class BlockKind(NamedTuple):
    """What the costs of a block depend on.

    stack: its name. moe: its FFN is an MoE layer. inserted: an MoE layer is behind it. window: of attention.
    group: the place in `moe.groups` of its MoE layer, from 0; None: no group has it.
    """

    stack: str
    moe: bool
    inserted: bool
    window: int | None
    group: int | None = None


def block_kinds(config: RunConfig) -> list[BlockKind]:
    """Return the kind of each block, an encoder's first; without those of multi-token prediction."""
    groups = {number: place for place, numbers in enumerate(group_layers(config)) for number in numbers}
    return [
        BlockKind(
            stack.name,
            block in stack.moe_blocks,
            block in stack.layers.insert_after,
            window_of(config.model, block),
            groups.get(stack.first - 1 + block),
        )
        for stack in stacks(config)
        if stack.name != PREDICTION
        for block in range(1, stack.num_layers + 1)
    ]


def with_blocks(config: RunConfig, blocks: list[int]) -> RunConfig:
    """Return the model of some of its blocks, counted from 0 through all stacks, in their order.

    blocks: at least one of each stack.
    """
    all_kinds = block_kinds(config)
    chosen: dict[str, list[BlockKind]] = {}
    for block in blocks:
        chosen.setdefault(all_kinds[block].stack, []).append(all_kinds[block])
    changed = copy.deepcopy(config)
    changed.moe.groups = list(_groups(changed, chosen))
    if config.model.architecture == "encoder_decoder":
        changed.model.encoder_layers = len(chosen["encoder"])
        changed.model.num_layers = len(chosen["decoder"])
        positions = {name: _positions(of_stack) for name, of_stack in chosen.items()}
        changed.moe.layers = LayersConfig(encoder=positions["encoder"], decoder=positions["decoder"])
        return changed
    [of_stack] = chosen.values()
    changed.model.num_layers = len(of_stack)
    layers = _positions(of_stack)
    changed.moe.layers = LayersConfig(at=layers.at, insert_after=layers.insert_after)
    if config.model.attention.window is not None:
        windows = [number for number, kind in enumerate(of_stack, 1) if kind.window is not None]
        changed.model.attention.window_blocks = windows or None
        changed.model.attention.window = config.model.attention.window if windows else None
    return changed


def _groups(config: RunConfig, chosen: dict[str, list[BlockKind]]) -> Iterator[LayerGroupConfig]:
    """Yield the groups that have layers in these blocks, by stack, with the positions of the layers there."""
    for place, group in enumerate(config.moe.groups):
        at = {
            name: [number for number, kind in enumerate(of_stack, 1) if kind.group == place]
            for name, of_stack in chosen.items()
        }
        if not any(at.values()):
            continue
        if config.model.architecture == "encoder_decoder":
            encoder, decoder = (GroupStackConfig(at=at[name]) for name in ("encoder", "decoder"))
            layers = GroupLayersConfig(encoder=encoder, decoder=decoder)
        else:
            [numbers] = at.values()
            layers = GroupLayersConfig(at=numbers)
        yield replace(group, layers=layers)


def _positions(blocks: list[BlockKind]) -> StackLayersConfig:
    """Return the positions of the MoE layers in a stack of these blocks."""
    return StackLayersConfig(
        at=[number for number, kind in enumerate(blocks, 1) if kind.moe],
        insert_after=[number for number, kind in enumerate(blocks, 1) if kind.inserted],
    )


def fewer_blocks(config: RunConfig, own: Sequence[int] | None = None) -> list[tuple[int, list[int]]]:
    """Return sets of blocks whose costs, each times its factor, sum to the costs of all.

    The first set has one block of each kind, and the others one more of a kind. The last block of each stack
    is in all. own: the blocks of a pipeline stage, counted from 0; None: all.
    """
    all_kinds = dict(enumerate(block_kinds(config)))
    if own is not None:
        all_kinds = {block: all_kinds[block] for block in own}
    places: dict[BlockKind, list[int]] = {}
    for block, kind in reversed(all_kinds.items()):
        places.setdefault(kind, []).append(block)
    counts = Counter(all_kinds.values())
    base = [block for of_kind in places.values() for block in of_kind[:SIMULATED]]
    terms: list[tuple[int, list[int]]] = []
    further = 0
    for kind, of_kind in places.items():
        missing = counts[kind] - SIMULATED
        if missing > 0:
            further += missing
            terms.append((missing, sorted([*base, of_kind[SIMULATED]])))
    return [(1 - further, sorted(base)), *terms]


def is_worth_it(config: RunConfig) -> bool:
    """Whether the simulated sets have fewer blocks together than the model."""
    return sum(len(blocks) for _, blocks in fewer_blocks(config)) < len(block_kinds(config))
