"""What a plan puts in the place of data, batches, and parts whose sizes depend on the values of tokens."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megamoe.apps.plan.counter import STAGES, CostCounter, Parts
from megamoe.config import RunConfig
from megamoe.config.parts import PartChoice
from megamoe.config.shapes import moe_layer_numbers
from megamoe.data.batches import Batch
from megamoe.kernels.attention.documents import Documents, SourceLengths
from megamoe.model.size import mean_choices
from megamoe.moe.context import Padding
from megamoe.moe.dispatch import AllToAllDispatch, DispatchState, LocalDispatch
from megamoe.moe.routing import Routing
from megamoe.moe.suggestions import provides
from megamoe.parallel.pipeline.links import StageLinks
from megamoe.registry import get_part
from megamoe.train import step
from megamoe.train.resolved import ResolvedRun


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
    if changed.data.document_aware:
        changed.data.document_aware = False
        lines.append("data.document_aware: attention is counted over whole sequences, which costs more")
    if not moe_layer_numbers(config):
        return changed, lines
    router = changed.moe.router
    if router.masks:
        names = ", ".join(mask.name for mask in router.masks)
        lines.append(
            f"moe.router.masks: {names} forbid experts by value; a token's experts are counted without"
        )
        router.masks = []
    if provides("assigned", router.selector) or not provides("fixed_count", router.selector):
        chosen = max(1, round(mean_choices(config)))
        line = (
            f"moe.router.selector: {router.selector.name} chooses by value; counted as top_k with k={chosen}"
        )
        part = get_part("selector", "top_k")
        # One expert has the weight 1 after renormalisation, and its router no gradient.
        weights = {"weights": "raw"} if chosen == 1 else {}
        router.selector = PartChoice("selector", "top_k", part.Config(k=chosen, **weights))
        lines.append(line)
    if not provides("dropless", router.capacity):
        name = router.capacity.name
        lines.append(f"moe.router.capacity: {name} drops pairs by value; counted as if none were dropped")
        router.capacity = PartChoice.default("capacity")
    return changed, lines


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

    with ExitStack() as stack:
        stack.enter_context(patch.object(Padding, "of", padding))
        stack.enter_context(patch.object(Padding, "bounds", bounds))
        for kind, name in ((Documents, "of_lengths"), (SourceLengths, "of")):
            stack.enter_context(patch.object(kind, name, lambda lengths_B, size, device="cpu": None))
        yield


@contextmanager
def stages_that_send(parts: Parts, counter: CostCounter) -> Iterator[None]:
    """Inside, one pipeline stage sends and receives alone. What it receives are activations.

    What it sends has left when it sends again. The step's record stays the one of this stage.
    """
    send, receive = (parts.within(STAGES, getattr(StageLinks, name)) for name in ("_send", "_receive"))

    def sent(self: StageLinks, tensor: Tensor, link: Any) -> None:
        self._under_way.clear()
        with counter.during("forward" if link is self.forward_out else "backward"):
            send(self, tensor, link)

    def received(self: StageLinks, *arguments: Any) -> Any:
        with counter.during("forward"):
            return receive(self, *arguments)

    with ExitStack() as stack:
        stack.enter_context(patch.object(StageLinks, "_send", sent))
        stack.enter_context(patch.object(StageLinks, "_receive", received))
        stack.enter_context(patch.object(step, "merged_over_stages", lambda record, pipeline: record))
        yield


class CountedDispatch:
    """A dispatch whose operators belong to the parts `dispatch` and `combine`, under a given load.

    load: rows that this rank's experts get, over the mean of all ranks.
    """

    def __init__(self, inner: AllToAllDispatch | LocalDispatch, load: float, parts: Parts) -> None:
        self._inner, self._load, self._parts = inner, load, parts
        self._pairs = 0
        if isinstance(inner, AllToAllDispatch):
            inner.read_counts = self._counts

    def dispatch(self, hidden_TH: Tensor, routing: Routing) -> tuple[Tensor, Tensor, DispatchState]:
        """See `AllToAllDispatch`."""
        self._pairs = len(routing.pairs.token_N)
        with self._parts.inside("dispatch"):
            return self._inner.dispatch(hidden_TH, routing)

    def send_along(self, values_N: Tensor, plan: DispatchState) -> Tensor:
        """See `AllToAllDispatch`."""
        return self._inner.send_along(values_N, plan)

    def combine(self, rows_NH: Tensor, plan: DispatchState) -> Tensor:
        """See `AllToAllDispatch`."""
        with self._parts.inside("combine"):
            return self._inner.combine(rows_NH, plan)

    def _counts(self, counts: Sequence[Tensor]) -> list[list[int]]:
        """This rank is the fullest, and all ranks send to it alike; the others share the rest evenly."""
        inner: Any = self._inner
        for vector in counts[:1]:
            vector.cpu()  # the copy for which a real run waits
        sent, received, gathered = (len(vector) for vector in counts)
        to_full = min(self._pairs, round(self._load * self._pairs / sent))
        others = evenly(self._pairs - to_full, sent - 1)
        sent_R = [*others[: inner.rank], to_full, *others[inner.rank :]] if sent > 1 else [self._pairs]
        received_R = [to_full] * received
        return [sent_R, received_R, [sum(received_R)] * gathered]


def evenly(total: int, parts: int) -> list[int]:
    """The total in so many parts, the first ones larger by 1."""
    return [total // parts + (number < total % parts) for number in range(parts)]
