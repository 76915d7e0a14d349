"""What routing costs: the router's and the losses' share of the MoE layer's time, for every registered part.

    python benchmarks/router_share.py [--parts threshold,switch_balance] [--rounds 5]
                                      [--experts 512] [--tokens 4096] [--plugin my_parts.py]

Each part stands in a layer of its own with the neighbours that it requires, once with each of its examples,
by which a token has about 8 experts (`tests/support/moe/examples.py`). The bar: router and losses, forward
and backward, take at most 10 % of the whole layer's time with experts in fp32 (`all fp32`; beyond, the
line says `over`). Not held to it: layers whose selector solves an assignment or draws the experts (`no bar`).
`all bf16`, the share where the experts compute in bf16 while the router stays fp32 by principle, has no bar
either.

The layer, and the router and its losses alone, are measured in turn, so that a machine whose speed drifts
slows both; printed are medians of the rounds' ratios.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from common.command import parser_of, positive, user_errors_exit_2
from common.machine import settle_process
from common.moe_layer import build_layer
from megamoe.config import parse_config
from megamoe.errors import UserError
from megamoe.moe.capabilities import capabilities
from megamoe.moe.context import MicroBatch
from megamoe.moe.experts.grouped import GroupedExperts
from megamoe.moe.layer import MoELayer
from megamoe.registry import KINDS, list_parts, load_plugin, nearest_and_all
from tests.support.moe.examples import example_trees, examples_of

HIDDEN, FFN, VOCAB, SEQUENCES, CHOICES = 512, 256, 32000, 8, 8
BAR = 0.10
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP_ROUNDS = 1

Tree = dict[str, Any]

# Beside a part, where they make sense.
LOSSES: Tree = {"switch_balance": 0.01, "z_loss": 0.001}


def main() -> int:
    """Measure and print; 1 if a part could not be measured or is over the bar, 2 for a mistake."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", help="names, or kind/name, separated by commas; default: all")
    parser.add_argument("--plugin", action="append", default=[], help="also the parts of this file or module")
    parser.add_argument("--experts", type=positive, default=512)
    parser.add_argument("--tokens", type=positive, default=4096)
    parser.add_argument("--rounds", type=positive, default=5)
    arguments = parser.parse_args()
    with user_errors_exit_2(parser):
        for plugin in arguments.plugin:
            load_plugin(plugin)
        cases = list(cases_of(arguments.parts, arguments.experts))
    settle_process()
    bench = Bench(arguments.experts, arguments.tokens, arguments.rounds)
    size = f"{arguments.tokens} tokens, {arguments.experts} experts of {FFN}, hidden {HIDDEN}, k = {CHOICES}"
    print(f"{size}, {torch.get_num_threads()} threads; shares of the fp32 layer, forward and backward")
    print(f"{'part':52}{'layer ms':>9}{'all fp32':>10}{'all bf16':>10}", flush=True)
    return int(any([not bench.report(*case) for case in cases]))


def cases_of(wanted: str | None, num_experts: int) -> Iterator[tuple[str, str, str, Tree]]:
    """(kind, name, options in words, section `moe`) of every example; UserError for an unknown part."""
    parts = [(kind, name) for kind in KINDS for name in list_parts(kind)]
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
        examples = examples_of(kind, name, num_experts, CHOICES)
        trees = example_trees(kind, name, num_experts, CHOICES, LOSSES)
        for example, tree in zip(examples, trees, strict=True):
            yield kind, name, " ".join(f"{key}={value}" for key, value in example.options.items()), tree


def has_bar(tree: Tree) -> bool:
    """Return whether the bar holds for the layer: its selector neither solves an assignment nor draws."""
    return not {"assigned", "drawn"} & capabilities(parse_config({"moe": tree}).moe.router.selector)


@dataclasses.dataclass
class Measured:
    """Seconds of each round: the layer by dtype of its experts, and the router with the losses."""

    layer: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {name: [] for name in DTYPES})
    router: list[float] = dataclasses.field(default_factory=list)

    def share(self, dtype: str) -> float:
        """Median over the rounds of the router's share of the layer."""
        return statistics.median(a / b for a, b in zip(self.router, self.layer[dtype], strict=True))


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

    def report(self, kind: str, name: str, options: str, tree: Tree) -> bool:
        """Measure one case and print its line; whether it was measured and clears the bar."""
        label = f"{kind} {name} {options}"
        try:
            found = self._measured(tree)
        except Exception as error:  # a part that does not run here must not hide the others
            print(f"{label:52} {type(error).__name__}: {' '.join(str(error).split())[:150]}", flush=True)
            return False
        held = has_bar(tree)
        over = held and found.share("fp32") > BAR
        verdict = "  over" if over else "" if held else "  no bar"
        row = "".join(f"{100 * found.share(dtype):9.1f}%" for dtype in DTYPES)
        print(f"{label:52}{1000 * statistics.median(found.layer['fp32']):9.0f}{row}{verdict}", flush=True)
        return not over

    def _measured(self, tree: Tree) -> Measured:
        key = json.dumps(tree, sort_keys=True)
        if key not in self.known:
            self.known[key] = self._measure(self._layer(tree))
        return self.known[key]

    def _measure(self, layer: MoELayer) -> Measured:
        found = Measured()
        for number in range(WARM_UP_ROUNDS + self.rounds):
            layer.context.step += 1
            times = {name: clock(layer, partial(self._whole, layer, name)) for name in DTYPES}
            router = clock(layer, lambda: self._route(layer))
            if number >= WARM_UP_ROUNDS:
                found.router.append(router)
                for name, seconds in times.items():
                    found.layer[name].append(seconds)
        return found

    def _layer(self, tree: Tree) -> MoELayer:
        """A layer of small experts, whose place the shared ones take, and what the training loop tells it."""
        layer = build_layer(tree, HIDDEN, ffn=8, vocab_size=VOCAB)
        rollouts = max([part.num_rollouts for part in layer.losses.objectives.values()], default=1)
        token_T = torch.arange(self.num_tokens)
        layer.context.batch = MicroBatch(
            token_index_T=token_T,
            token_ids_T=token_T * 7919 % VOCAB,
            sample_index_B=torch.arange(SEQUENCES) % (SEQUENCES // rollouts),
            num_rollouts=rollouts,
        )
        return layer

    def _whole(self, layer: MoELayer, dtype: str) -> None:
        layer.experts = self.experts[dtype]
        hidden_TH = self.hidden_TH.to(DTYPES[dtype]).requires_grad_()
        output_TH = layer(hidden_TH)
        outputs, upstream = [output_TH], [hidden_TH.detach()]
        if layer.losses.objectives:
            outputs.append(layer.objective(self.hidden_TH[:, 0]))
            upstream.append(torch.ones(()))
        torch.autograd.backward(outputs, upstream)

    def _route(self, layer: MoELayer) -> None:
        """Do what `MoELayer.forward` does without experts, their dispatch and combination."""
        routing = layer.router(self.hidden_TH.clone().requires_grad_(), layer.context)
        waiting = layer.losses.objectives
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


if __name__ == "__main__":
    raise SystemExit(main())
