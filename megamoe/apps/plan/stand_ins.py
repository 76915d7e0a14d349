"""What a plan puts in place of data, batches, and parts whose sizes depend on the values of tokens."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from megamoe.apps.plan.counter import COMBINE, DISPATCH, STAGES, CostCounter, Parts
from megamoe.compat import replaced
from megamoe.config import RunConfig
from megamoe.config.layer_kinds import kinds
from megamoe.config.parts import PartChoice
from megamoe.config.schema import MoELayerConfig, ZeroExpertsConfig
from megamoe.config.shapes import moe_layer_numbers
from megamoe.data.batches import Batch
from megamoe.kernels.attention.documents import Documents, SourceLengths
from megamoe.moe.capabilities import capabilities, provides
from megamoe.moe.context import Padding
from megamoe.moe.dispatch.by_node import ByNodeDispatch
from megamoe.moe.dispatch.direct import DirectDispatch
from megamoe.moe.dispatch.dispatcher import Dispatcher
from megamoe.moe.router import mean_choices
from megamoe.moe.routing import Routing
from megamoe.moe.validation import candidates_of, experts_wanted, part_problems
from megamoe.objectives.objective import objective_class
from megamoe.parallel.pipeline.links import StageLinks
from megamoe.registry import get_part
from megamoe.train.resolved import ResolvedRun

PART_OF_METHOD = {
    "finish": DISPATCH,
    "dispatched_weights": DISPATCH,
    "combine": COMBINE,
    "combine_weighted": COMBINE,
}
STEPS_OF_EPOCHS = 1_000_000  # more than any warm-up or growth of the batch


def without_data(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return a configuration that needs no data and no values of tokens, and a line for each change.

    Data that is named is replaced where model.vocab_size says the vocabulary, which is all that counts here.
    """
    changed, lines = copy.deepcopy(config), []
    if changed.model.vocab_size is not None and not changed.data.mock:
        changed.data.mock, changed.data.sources, changed.data.split = True, [], [1.0, 0.0, 0.0]
        changed.data.validation, changed.data.sampling_exponent = {}, None
        changed.data.tokenizer = None
        lines.append("the data is not read; all sequences are full")
        if changed.train.epochs is not None:
            changed.train.steps, changed.train.epochs = STEPS_OF_EPOCHS, None
            lines.append(f"train.epochs: their length is not known; counted as {STEPS_OF_EPOCHS:,} steps")
    if changed.model.architecture == "decoder" and objective_class(config).pads:
        lines.append(f"train.objective: {config.train.objective.name} is counted as causal")
        changed.train.objective = PartChoice.default("objective")
    if changed.data.document_aware:
        changed.data.document_aware = False
        lines.append("data.document_aware: attention is counted over whole sequences, which costs more")
    if not moe_layer_numbers(config):
        return changed, lines
    used = {kind.key for kind in kinds(config)}
    sections: dict[str, MoELayerConfig] = {"moe": changed.moe}
    sections |= {f"moe.groups[{number}]": group for number, group in enumerate(changed.moe.groups)}
    for key, section in sections.items():
        if key in used:
            lines += _count_evenly(section, f"{key}.router", config.parallel.expert)
            lines += _drop_losses(section, key, config.parallel.expert)
    return changed, lines


def _count_evenly(moe: MoELayerConfig, key: str, expert_ranks: int) -> list[str]:
    """Replace the parts of a layer's router that choose or drop by value; return a line for each."""
    router, lines = moe.router, []
    if router.masks and not _leaves_enough(moe, expert_ranks):
        names = ", ".join(mask.name for mask in router.masks)
        lines.append(f"{key}.masks: {names} forbid experts by value; a token's experts are counted without")
        router.masks = []
    if moe.zero_experts.total:
        chosen = max(1, round(mean_choices(moe)))
        section = key.removesuffix(".router")
        lines.append(f"{section}.zero_experts: chosen by value; counted as {chosen} experts that compute")
        moe.zero_experts, router.selector = ZeroExpertsConfig(), _top_k(chosen)
        if provides("mean_experts", router.score_function):
            options = replace(router.score_function.options, mean_experts=None)
            router.score_function = replace(router.score_function, options=options)
    elif provides("assigned", router.selector) or not provides("fixed_count", router.selector):
        chosen = max(1, round(mean_choices(moe)))
        line = f"{key}.selector: {router.selector.name} chooses by value; counted as top_k with k={chosen}"
        router.selector = _top_k(chosen)
        lines.append(line)
    if provides("zeros", router.score_function) and provides("fixed_count", router.selector):
        name, router.score_function = router.score_function.name, PartChoice.default("score_function")
        line = f"{name} makes p of exactly 0 by value; counted as {router.score_function.name}"
        lines.append(f"{key}.score_function: {line}")
    if not provides("dropless", router.capacity):
        name = router.capacity.name
        lines.append(f"{key}.capacity: {name} drops pairs by value; counted as if none were dropped")
        router.capacity = PartChoice.default("capacity")
    return lines


def _drop_losses(moe: MoELayerConfig, key: str, expert_ranks: int) -> list[str]:
    """Remove the losses that need what was replaced; return a line for each. All fitted before."""
    section: Any = moe
    wrong = {problem.key for problem in part_problems(section, expert_ranks)}
    names = [name for name in moe.losses if f"moe.losses.{name}" in wrong]
    for name in names:
        del moe.losses[name]
    return [f"{key}.losses.{name}: needs what is replaced above; not counted" for name in names]


def _top_k(chosen: int) -> PartChoice:
    """Return top_k; one expert has the weight 1 after renormalisation, and its router no gradient."""
    weights = {"weights": "raw"} if chosen == 1 else {}
    return PartChoice("selector", "top_k", get_part("selector", "top_k").Config(k=chosen, **weights))


def _leaves_enough(moe: Any, expert_ranks: int) -> bool:
    """Return whether the masks change which experts a token has, and not how many."""
    router = moe.router
    if len(router.masks) > 1 or "by_ranking" not in capabilities(router.selector):
        return False
    left = candidates_of(router.masks[0], moe.num_experts, expert_ranks)
    return left.least >= experts_wanted(moe) and provides("fixed_count", router.selector)


def sample_batch(run: ResolvedRun) -> Batch:
    """Return a batch whose shapes are those of training; of other objectives than text, of real samples."""
    config = run.config
    size = config.train.micro_batch_size
    if config.model.architecture == "decoder":
        tokens_BS = torch.zeros((size, config.data.sequence_length), dtype=torch.int64)
        sample_B = torch.zeros(size, dtype=torch.int64)
        return Batch(tokens_BS, tokens_BS, tokens_BS, torch.ones(tokens_BS.shape), None, sample_B)
    samples = run.objective.datasets(train_samples=size, validation_samples=0).train
    numbers = list(range(size))
    return run.objective.make_batch([samples[number] for number in numbers], numbers)


def without_values(batch: Batch) -> Batch:
    """Return a batch of the same shapes and dtypes, for the fake mode that is active."""
    values: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    values["document_start_BS"] = None
    for name, value in values.items():
        values[name] = value if value is None else torch.zeros(value.shape, dtype=value.dtype)
    return Batch(**values)


@contextmanager
def full_sequences() -> Iterator[None]:
    """Inside, sequences that may end in padding have none, and the lengths of sequences are not read.

    As in a real run, an MoE layer selects the tokens that are not padding, which are all.
    """

    def padding(lengths_B: Tensor, size: int, device: torch.device | str = "cpu") -> Padding:
        places = size * len(lengths_B)
        place_V = torch.arange(places)
        return Padding(place_V.to(device, non_blocking=True), place_V, places, len(lengths_B))

    def bounds(self: Padding, ranks: int) -> tuple[int, ...]:
        return tuple(range(0, self.num_places + 1, self.num_places // ranks))

    def no_lengths(lengths_B: Tensor, size: int, device: Any = "cpu") -> None: ...

    without = replaced(Documents, of_lengths=no_lengths), replaced(SourceLengths, of=no_lengths)
    with replaced(Padding, of=padding, bounds=bounds), without[0], without[1]:
        yield


@contextmanager
def stages_that_send(parts: Parts, counter: CostCounter) -> Iterator[None]:
    """Inside, one pipeline stage sends and receives alone. What it receives are activations.

    What it sends has left when it sends again.
    """
    send, receive = (parts.within(STAGES, getattr(StageLinks, name)) for name in ("_send", "_receive"))

    def sent(self: StageLinks, tensor: Tensor, link: Any) -> None:
        self._under_way.clear()
        with counter.during("forward" if link is self.forward_out else "backward"):
            send(self, tensor, link)

    def received(self: StageLinks, *arguments: Any) -> Any:
        with counter.during("forward"):
            return receive(self, *arguments)

    with replaced(StageLinks, _send=sent, _receive=received):
        yield


class CountedDispatch:
    """A dispatch whose operators belong to the parts `dispatch` and `combine`, under a given load.

    load: rows that this rank's experts get, over the mean of all ranks. nodes_of_token: on how many nodes a
    token's experts lie on average.
    """

    def __init__(self, inner: Dispatcher, load: float, parts: Parts, nodes_of_token: float = 1.0) -> None:
        self._inner, self._load, self._parts = inner, load, parts
        self._pairs, self._tokens, self._nodes_of_token = 0, 0, nodes_of_token
        if isinstance(inner, DirectDispatch | ByNodeDispatch):
            inner.read_counts = self._counts

    def start(self, hidden_TH: Tensor, routing: Routing) -> Any:
        """See `Dispatcher`."""
        self._pairs, self._tokens = len(routing.pairs.token_N), len(hidden_TH)
        with self._parts.inside(DISPATCH):
            return self._inner.start(hidden_TH, routing)

    def __getattr__(self, name: str) -> Any:
        """Return another method of the dispatch, with the part that it belongs to."""
        method = getattr(self._inner, name)
        return self._parts.within(PART_OF_METHOD[name], method) if name in PART_OF_METHOD else method

    def _counts(self, counts: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """This rank is the fullest, and all ranks send to it alike; the others share the rest evenly."""
        next(iter(counts.values())).cpu()  # the copy for which a real run waits
        inner: Any = self._inner
        by_node = isinstance(inner, ByNodeDispatch)
        nodes = inner.num_nodes if by_node else 1
        direct: DirectDispatch = inner.inside if by_node else inner
        ranks = nodes * direct.num_ranks
        to_full = min(self._pairs, round(self._load * self._pairs / ranks))
        others = evenly(self._pairs - to_full, ranks - 1) if ranks > 1 else []
        # Sorted by node, this rank's own in its place.
        place = direct.rank + (inner.node if by_node else 0) * direct.num_ranks
        sent_R = [*others[:place], to_full, *others[place:]]
        found = {"sent": sent_R, "received": [to_full] * ranks}
        if by_node:
            found = self._by_node(sent_R, to_full, nodes, inner.node)
        found["gathered"] = [sum(found.get("received", sent_R))] * direct.num_slices
        found["experts"] = evenly(sum(found["gathered"]), len(counts.get("experts", [0])))
        return {name: numbers for name, numbers in found.items() if name in counts}

    def _by_node(self, sent_R: list[int], to_full: int, nodes: int, node: int) -> dict[str, list[int]]:
        size = len(sent_R) // nodes
        pairs_S = [sum(sent_R[first : first + size]) for first in range(0, len(sent_R), size)]
        share = self._tokens * self._nodes_of_token / max(self._pairs, 1)  # rows of a pair
        rows_S = [min(self._tokens, round(share * pairs)) for pairs in pairs_S]
        return {
            "rows_sent": rows_S,
            "rows_received": [rows_S[node]] * nodes,
            "pairs_sent": pairs_S,
            "pairs_received": [pairs_S[node]] * nodes,
            # Every rank of this node has the pairs of a rank of each node.
            "sent": [nodes * pairs for pairs in sent_R[node * size : (node + 1) * size]],
            "received": [nodes * to_full] * size,
        }


def evenly(total: int, parts: int) -> list[int]:
    """The total in so many parts, the first ones larger by 1."""
    return [total // parts + (number < total % parts) for number in range(parts)]
