"""What routing costs: the router's and the losses' share of the MoE layer's time, for every registered part.

    python benchmarks/router_share.py [--parts threshold,switch_balance] [--rounds 5]
                                      [--experts 512] [--tokens 4096]

Each part stands in a layer of its own with the neighbours it needs, and with options by which a token has
about 8 experts. The bar: router and losses, forward and backward, take at most 10 % of the whole layer's time
with experts in fp32 (`all fp32`; beyond, the line says `over`). Not held to it: `balanced` and `sinkhorn`,
which solve an assignment, and the policy's `policy`, `sample` and `grpo` (`no bar`). `all bf16`, the share
where the experts compute in bf16 while the router stays fp32 by principle, has no bar either.

The layer, the router and its losses alone, and every stage by itself are measured in turn, so that a machine
whose speed drifts slows all of them; printed are medians of the rounds' ratios, all but the last of fp32. A
stage by itself gets the inputs that it had in the router.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from common.command import mistakes_told, parser_of, positive
from common.machine import settle_process
from common.moe_layer import build_layer
from megamoe.errors import UserError
from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.moe.layer import MoELayer
from megamoe.moe.part import Part, StepContext
from megamoe.registry import get_part, list_parts, nearest_and_all

HIDDEN, FFN, VOCAB, SEQUENCES, CHOICES = 512, 256, 32000, 8, 8
BAR = 0.10
WITHOUT_BAR = ("balanced", "sinkhorn", "policy", "sample", "grpo")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
STAGES = ("scorer", "masks", "score_function", "selector", "capacity", "losses")
WARM_UP_ROUNDS = 1

Tree = dict[str, Any]
Call = tuple[Part, tuple[Any, ...]]

HIERARCHICAL: Tree = {
    "router": {
        "scorer": {"name": "hierarchical", "noisy": True},
        "selector": {"name": "hierarchical_top_k", "groups": 2, "k": CHOICES // 2},
    },
    "losses": {"importance": 0.1, "hierarchical_load": 0.1},
}
POLICY: Tree = {
    "router": {"scorer": "policy", "selector": {"name": "sample", "k": CHOICES}},
    "losses": {"grpo": 0.01},
}
STABLE: Tree = {
    "router": {"scorer": "stable", "score_function": "sigmoid"},
    "losses": {"stable_balance": 0.3, "stable_distillation": 1.0},
}
HASH: Tree = {"router": {"scorer": "hash", "selector": {"name": "table", "k": CHOICES}}, "losses": {}}
# What a part needs beside it; whatever is not here stands in the plain layer of `layer_tree`.
COMPANY: dict[tuple[str, str], Tree] = {
    ("scorer", "hash"): HASH,
    ("selector", "table"): HASH,
    ("scorer", "hierarchical"): HIERARCHICAL,
    ("selector", "hierarchical_top_k"): HIERARCHICAL,
    ("loss", "hierarchical_load"): HIERARCHICAL,
    ("scorer", "policy"): POLICY,
    ("selector", "sample"): POLICY,
    ("loss", "grpo"): POLICY,
    ("scorer", "stable"): STABLE,
    ("loss", "stable_balance"): STABLE,
    ("loss", "stable_distillation"): STABLE,
    ("loss", "load"): {"router": {"scorer": "noisy"}, "losses": {"importance": 0.1}},
    ("loss", "cosine_balance"): {"router": {"scorer": "cosine"}},
    ("selector", "balanced"): {"router": {"score_function": "sigmoid"}, "losses": {"z_loss": 0.001}},
    ("selector", "expert_choice"): {"losses": {"z_loss": 0.001}},
    # As sure as a trained score_function: 8.3 experts a token on average.
    ("selector", "threshold"): {"router": {"score_function": {"name": "softmax", "temperature": 0.1}}},
}
# A part's options here; several are measured one by one. Without an entry: its defaults.
OPTIONS: dict[tuple[str, str], list[Tree]] = {
    ("scorer", "linear"): [{}, {"jitter": 0.01}],
    ("scorer", "hierarchical"): [{"noisy": True}],
    ("mask", "entropy_prune"): [{"num_groups": 8}],
    ("mask", "gating_dropout"): [{"ranks": 8, "rate": 0.5}],
    ("score_function", "sigmoid"): [{}, {"bias_update": 0.001}],
    ("selector", "hierarchical_top_k"): [{"groups": 2, "k": CHOICES // 2}],
    ("selector", "entropy_aware"): [{"max_k": CHOICES}],
    ("selector", "expert_choice"): [{"allow_non_causal": True}],
    ("capacity", "per_expert"): [
        {"priority": name}
        for name in ("position", "probability", "choice_then_probability", "batch_prioritised", "random")
    ],
    ("capacity", "device"): [{"devices": 8}],
    ("loss", "switch_balance"): [{}, {"scope": "sequence"}, {"scope": "global_batch", "running": True}],
}


def main() -> int:
    """Measure and print; 1 if a part could not be measured or is over the bar, 2 for a mistake."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", help="names, or kind/name, separated by commas; default: all")
    parser.add_argument("--experts", type=positive, default=512)
    parser.add_argument("--tokens", type=positive, default=4096)
    parser.add_argument("--rounds", type=positive, default=5)
    arguments = parser.parse_args()
    with mistakes_told(parser):
        cases = list(cases_of(arguments.parts))
    settle_process()
    bench = Bench(arguments.experts, arguments.tokens, arguments.rounds)
    size = f"{arguments.tokens} tokens, {arguments.experts} experts of {FFN}, hidden {HIDDEN}, k = {CHOICES}"
    print(f"{size}, {torch.get_num_threads()} threads; shares of the fp32 layer, forward and backward")
    columns = "".join(f"{name[:8]:>9}" for name in (*STAGES, "all fp32", "all bf16"))
    print(f"{'part':52}{'layer ms':>9}{'part':>8}{columns}", flush=True)
    return int(any([not bench.report(kind, name, options) for kind, name, options in cases]))


def cases_of(wanted: str | None) -> Iterator[tuple[str, str, Tree]]:
    """(kind, name, options) of every case; UserError for a part that there is not."""
    kinds = ("scorer", "mask", "score_function", "selector", "capacity", "loss")
    parts = [(kind, name) for kind in kinds for name in list_parts(kind)]
    if wanted is not None:
        names = wanted.split(",")
        known = [name for _, name in parts] + [f"{kind}/{name}" for kind, name in parts]
        for name in names:
            if name not in known:
                raise UserError(
                    f"--parts: there is no part {name!r}{nearest_and_all(name, sorted(set(known)))}"
                )
        parts = [(kind, name) for kind, name in parts if name in names or f"{kind}/{name}" in names]
    for kind, name in parts:
        for options in OPTIONS.get((kind, name), [{}]):
            yield kind, name, options


def layer_tree(kind: str, name: str, options: Tree, num_experts: int) -> Tree:
    """The section `moe`: the part, its company, otherwise linear, softmax, top-8, balance loss and z-loss."""
    company = COMPANY.get((kind, name), {})
    router: Tree = {"selector": {"name": "top_k", "k": CHOICES}, **company.get("router", {})}
    losses: Tree = dict(company.get("losses", {"switch_balance": 0.01, "z_loss": 0.001}))
    chosen = {"name": name, **options}
    if kind == "loss":
        losses[name] = {"weight": 0.01, **options}
    else:
        if kind == "selector" and hasattr(get_part(kind, name).Config, "k"):
            chosen = {"k": CHOICES, **chosen}
        router |= {"masks": [chosen]} if kind == "mask" else {kind: chosen}
    return {"num_experts": num_experts, "router": router, "losses": losses}


@dataclasses.dataclass
class Measured:
    """Seconds of each round: the layer by dtype of its experts, the router, every stage and every part."""

    layer: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    router: list[float] = dataclasses.field(default_factory=list)
    stages: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    parts: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def share(self, seconds: list[float], dtype: str = "fp32") -> float:
        """Median over the rounds of their share of the layer."""
        return statistics.median(a / b for a, b in zip(seconds, self.layer[dtype], strict=True))


class Bench:
    """The experts, which all layers share, and the tokens."""

    def __init__(self, num_experts: int, num_tokens: int, rounds: int) -> None:
        self.num_experts, self.num_tokens, self.rounds = num_experts, num_tokens, rounds
        self.hidden_TH = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1))
        self.experts = {name: self._experts(dtype) for name, dtype in DTYPES.items()}
        self.known: dict[str, Measured] = {}

    def _experts(self, dtype: torch.dtype) -> GroupedExperts:
        sizes: Tree = {"activation": "swiglu", "std": 0.02, "output_std": 0.02, "seed": 1, "layer": 1}
        return GroupedExperts(HIDDEN, FFN, range(self.num_experts), **sizes).to(dtype)

    def report(self, kind: str, name: str, options: Tree) -> bool:
        """Measure one case and print its line; whether it was measured and clears the bar."""
        label = f"{kind} {name} " + " ".join(f"{key}={value}" for key, value in options.items())
        tree = layer_tree(kind, name, options, self.num_experts)
        try:
            found = self._measured(tree)
        except Exception as error:  # a part that does not run here must not hide the others
            print(f"{label:52} {type(error).__name__}: {' '.join(str(error).split())[:150]}", flush=True)
            return False
        own = found.share(found.parts[f"{kind} {name}"])
        shares = [found.share(found.stages[stage]) for stage in STAGES]
        total, total_bf16 = found.share(found.router), found.share(found.router, "bf16")
        layer_ms = 1000 * statistics.median(found.layer["fp32"])
        row = "".join(f"{100 * share:8.1f}%" for share in (*shares, total, total_bf16))
        over = total > BAR and name not in WITHOUT_BAR
        verdict = "  no bar" if name in WITHOUT_BAR else "  over" if over else ""
        print(f"{label:52}{layer_ms:9.0f}{100 * own:7.1f}%{row}{verdict}", flush=True)
        return not over

    def _measured(self, tree: Tree) -> Measured:
        key = json.dumps(tree, sort_keys=True)
        if key not in self.known:
            self.known[key] = self._measure(self._layer(tree))
        return self.known[key]

    def _measure(self, layer: MoELayer) -> Measured:
        calls = record_calls(layer, lambda: self._route(layer))
        found = Measured({name: [] for name in DTYPES}, [], {stage: [] for stage in STAGES})
        for number in range(WARM_UP_ROUNDS + self.rounds):
            layer.context.step += 1
            times = {name: clock(layer, partial(self._whole, layer, name)) for name in DTYPES}
            router = clock(layer, lambda: self._route(layer))
            by_part = [(label, stage, clock(layer, partial(replay, call))) for label, stage, call in calls]
            if number < WARM_UP_ROUNDS:
                continue
            found.router.append(router)
            for name, seconds in times.items():
                found.layer[name].append(seconds)
            for stage in STAGES:
                found.stages[stage].append(sum(s for _, where, s in by_part if where == stage))
            for label in {label for label, _, _ in by_part}:
                found.parts.setdefault(label, []).append(sum(s for other, _, s in by_part if other == label))
        return found

    def _layer(self, tree: Tree) -> MoELayer:
        """A layer of small experts, whose place the shared ones take, and what the training loop tells it."""
        layer = build_layer(tree, HIDDEN, ffn=8, vocab_size=VOCAB)
        rollouts = max([part.num_rollouts for part in layer.objectives.values()], default=1)
        token_T = torch.arange(self.num_tokens)
        layer.context.token_index_T = token_T
        layer.context.token_ids_T = token_T * 7919 % VOCAB
        layer.context.sample_index_B = torch.arange(SEQUENCES) % (SEQUENCES // rollouts)
        layer.context.num_rollouts = rollouts
        return layer

    def _whole(self, layer: MoELayer, dtype: str) -> None:
        layer.experts = self.experts[dtype]
        hidden_TH = self.hidden_TH.to(DTYPES[dtype]).requires_grad_()
        output_TH = layer(hidden_TH)
        outputs, upstream = [output_TH], [hidden_TH.detach()]
        if layer.objectives:
            outputs.append(layer.objective(self.hidden_TH[:, 0]))
            upstream.append(torch.ones(()))
        torch.autograd.backward(outputs, upstream)

    def _route(self, layer: MoELayer) -> None:
        """What `MoELayer.forward` does without experts, their dispatch and combination."""
        routing = layer.router(self.hidden_TH.clone().requires_grad_(), layer.context)
        waiting = layer.objectives
        values = [
            loss(routing, layer.context, *([self.hidden_TH[:, 0]] if name in waiting else []))
            for name, loss in layer.losses.items()
        ]
        routing.counts_E(), routing.wanted_counts_E()
        outputs = [value for value in (routing.pairs.weight_N, *values) if value.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])


def clock(layer: MoELayer, run: Callable[[], None]) -> float:
    """Seconds; gradients are made anew, so that adding to old ones is not counted."""
    layer.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def record_calls(layer: MoELayer, run: Callable[[], None]) -> list[tuple[str, str, Call]]:
    """(kind and name, stage, call) of every call of a part while `run` runs."""
    calls: list[tuple[str, str, Call]] = []
    handles = []
    for stage, choice, part in parts_of(layer):

        def note(module: Part, inputs: tuple[Any, ...], stage: str = stage, label: str = choice) -> None:
            calls.append((label, stage, (module, detached(inputs))))

        handles.append(part.register_forward_pre_hook(note))
    run()
    for handle in handles:
        handle.remove()
    return calls


def parts_of(layer: MoELayer) -> Iterator[tuple[str, str, Part]]:
    """(stage, kind and name, module)."""
    classes = {
        part: f"{kind} {name}"
        for kind in ("scorer", "mask", "score_function", "selector", "capacity", "loss")
        for name, part in list_parts(kind).items()
    }
    router = layer.router
    stages: dict[str, list[Any]] = {
        "scorer": [router.scorer],
        "masks": list(router.masks),
        "score_function": [router.score_function],
        "selector": [router.selector],
        "capacity": [router.capacity],
        "losses": list(layer.losses.values()),
    }
    for stage, parts in stages.items():
        for part in parts:
            yield stage, classes[type(part)], part


def replay(call: Call) -> None:
    """The call again, forward and backward, on the same inputs as leaves."""
    part, inputs = call
    outputs = [value for value in tensors_in(part(*detached(inputs))) if value.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])


def detached(value: Any) -> Any:
    """The same data with its floating-point tensors as leaves that take gradients."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        return tuple(detached(item) for item in value)
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, StepContext)):
        return type(value)(
            **{field.name: detached(getattr(value, field.name)) for field in dataclasses.fields(value)}
        )
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of nested data."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value):
        yield from tensors_in(list(vars(value).values()))


if __name__ == "__main__":
    raise SystemExit(main())
