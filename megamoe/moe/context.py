"""What the MoE layers know about the current step and micro batch, and its padding, which they do not
route.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.moe import rng
from megamoe.moe.timers import LocalComputeTimer, StageTimers


@dataclass(frozen=True)
class Padding:
    """The positions of the tokens that are not padding, among all S * B positions of a micro batch.

    place_V: int64, ascending, on the device of the layers. place_on_cpu_V: the same on the CPU, where the
    ranks' shares are counted. num_places: S * B. num_sequences: B.
    """

    place_V: Tensor
    place_on_cpu_V: Tensor
    num_places: int
    num_sequences: int

    @classmethod
    def of(cls, lengths_B: Tensor, size: int, device: torch.device | str = "cpu") -> "Padding":
        """Return the padding of sequences of `size` positions.

        lengths_B: integers on the CPU, the tokens of each sequence, which its padding follows. They may leave
        no padding: all ranks must build the same autograd graph, because ZeRO 3 compares the order of their
        modules, in backward and in recomputation too.
        """
        valid_SB = torch.arange(size)[:, None] < lengths_B
        place_V = valid_SB.flatten().nonzero().flatten()
        return cls(place_V.to(device, non_blocking=True), place_V, valid_SB.numel(), len(lengths_B))

    def bounds(self, ranks: int) -> tuple[int, ...]:
        """Return where each rank's tokens begin among the V, and V; ranks share the positions equally."""
        edges = torch.arange(ranks + 1) * (self.num_places // ranks)
        return tuple(torch.searchsorted(self.place_on_cpu_V, edges).tolist())

    def own_places(self, rank: int, ranks: int) -> Tensor:
        """Return the positions of a rank's tokens among the positions of that rank, int64."""
        bounds = self.bounds(ranks)
        return self.place_V[bounds[rank] : bounds[rank + 1]] - rank * (self.num_places // ranks)


@dataclass
class LayerTrace:
    """What an MoE layer keeps of its pass over a micro batch.

    observation: an `Observation`. routing: for an objective, which needs the model's token losses; else None.
    scores_TE: of this rank's tokens, fp32 [T, E] with gradient, where a residual reads them; else None.
    """

    observation: Any = None
    routing: Any = None
    scores_TE: Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """The tokens of a micro batch as the MoE layers know them, in order of position: token s * B + b is
    position s of sequence b.

    Parts see tokens only: a layer removes the padding before its router (`without_padding`).
    """

    token_index_T: Tensor | None = None
    """int64, each token's index in the data of the whole run, the key of every random draw; None: numbered
    from 0
    """
    token_ids_T: Tensor | None = None
    """int64, the token ids"""
    position_T: Tensor | None = None
    """int64, see `StepContext.position`"""
    sample_index_B: Tensor | None = None
    """int64, the sample number of each sequence; None: one sequence"""
    number: int = 0
    """its number in the run; data-parallel ranks take micro batches in turn"""
    num_rollouts: int = 1
    """G, if an objective has every sequence routed several times; sequence g * B / G + b is rollout g of
    sequence b
    """
    padding: Padding | None = None
    """the positions that are not tokens; None: all are tokens"""
    source: "MicroBatch | None" = None
    """the tokens of an encoder_decoder's encoder; the other fields are the decoder's"""
    sequence_T: Tensor | None = None
    """int64, the sequence of each token, where padding was removed"""
    bounds: tuple[int, ...] | None = None
    """where the tokens of each tensor-parallel rank begin, and their number, where padding was removed"""
    traces: dict[int, LayerTrace] = field(default_factory=dict)
    """what each layer keeps of its pass, by the layer's number"""

    @property
    def num_sequences(self) -> int:
        """The number of sequences B."""
        return 1 if self.sample_index_B is None else self.sample_index_B.numel()

    def tokens(self, rows: Tensor | slice, **changes: Any) -> "MicroBatch":
        """Return the micro batch of these tokens alone, an index int64 or a slice, with other fields
        changed.
        """

        def chosen(values_T: Tensor | None) -> Tensor | None:
            if values_T is None or isinstance(rows, slice):
                return None if values_T is None else values_T[rows]
            return values_T.to(rows.device)[rows]

        fields = ("token_index_T", "token_ids_T", "position_T", "sequence_T")
        return replace(self, **{name: chosen(getattr(self, name)) for name in fields} | changes)

    def without_padding(self, ranks: int) -> "MicroBatch":
        """Return the micro batch of the tokens that are not padding; ranks: over which its positions are
        spread.
        """
        assert self.padding is not None
        place_V, sequences = self.padding.place_V, self.padding.num_sequences
        changes: dict[str, Any] = {"sequence_T": place_V % sequences, "bounds": self.padding.bounds(ranks)}
        if self.token_index_T is None:
            changes["token_index_T"] = place_V
        if self.position_T is None:
            changes["position_T"] = place_V // sequences
        return self.tokens(place_V, padding=None, **changes)


@dataclass
class StepContext:
    """What the MoE layers know about the current step and micro batch; all layers of a model share one
    object.

    The training loop sets it. A part may read everything but the timers.
    """

    seed: int = 0
    step: int = 0
    aux_scale: float = 1.0
    """multiplies the gradient of the auxiliary losses, see `auxiliary_losses`"""
    data_group: dist.ProcessGroup | None = None
    """the ranks whose micro batches form the batch; None: this micro batch alone"""
    timers: StageTimers | None = None
    """of the layers' stages; None: not measured"""
    compute_timer: LocalComputeTimer = field(default_factory=lambda: LocalComputeTimer(torch.device("cpu")))
    """of this rank's own work"""
    batch: MicroBatch = field(default_factory=MicroBatch)

    @property
    def token_ids_T(self) -> Tensor | None:
        """The token ids, int64 [T]; None if the layer is not in a language model."""
        return self.batch.token_ids_T

    @property
    def sample_index_B(self) -> Tensor | None:
        """The sample number of each sequence, int64 [B]; None: one sequence."""
        return self.batch.sample_index_B

    @property
    def micro_batch(self) -> int:
        """The micro batch's number in the run; data-parallel ranks take micro batches in turn."""
        return self.batch.number

    @property
    def num_rollouts(self) -> int:
        """G, if an objective has every sequence routed several times, see `MicroBatch`."""
        return self.batch.num_rollouts

    @property
    def num_sequences(self) -> int:
        """The number of sequences B."""
        return self.batch.num_sequences

    def with_batch(self, batch: MicroBatch) -> "StepContext":
        """Return the context with another micro batch."""
        return replace(self, batch=batch)

    def of_source(self) -> "StepContext":
        """Return the context of the encoder's layers in an encoder_decoder."""
        assert self.batch.source is not None, "the encoder's tokens are not set"
        return self.with_batch(self.batch.source)

    def trace(self, layer: int) -> LayerTrace:
        """Return what a layer has kept of the micro batch; nothing before its pass."""
        return self.batch.traces.get(layer) or LayerTrace()

    def token_index(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return each token's index in the data, int64 [T]."""
        if self.batch.token_index_T is None:
            return torch.arange(num_tokens, device=device)
        return self.batch.token_index_T.to(device)

    def position(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return each token's position, from 0 in its sequence, or in its document with
        `data.document_aware`, int64 [T].

        It is the position that learned and rotary positions get, in generation too.
        """
        if self.batch.position_T is None:
            return torch.arange(num_tokens, device=device) // self.num_sequences
        return self.batch.position_T.to(device)

    def sequence(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the sequence of each token, from 0 to B - 1, int64 [T]."""
        if self.batch.sequence_T is not None:
            return self.batch.sequence_T.to(device)
        return torch.arange(num_tokens, device=device) % self.num_sequences

    def draw_key(self, layer: int, purpose: str) -> int:
        """Return the key of this step's draws for one purpose in one layer, for `rng.uniform`."""
        return rng.key(self.seed, self.step, layer, purpose)
