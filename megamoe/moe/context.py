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
    """The places of the tokens that are not padding, among all S * B places of a micro batch.

    place_V: int64, ascending, on the device of the layers. place_on_cpu_V: the same on the CPU, where the
    ranks' shares are counted. num_places: S * B. num_sequences: B.
    """

    place_V: Tensor
    place_on_cpu_V: Tensor
    num_places: int
    num_sequences: int

    @classmethod
    def of(cls, lengths_B: Tensor, size: int, device: torch.device | str = "cpu") -> "Padding":
        """Return the padding of sequences of `size` places.

        lengths_B: integers on the CPU, the tokens of each sequence, which its padding follows. They may leave
        no padding: all ranks must build the same autograd graph, because ZeRO 3 compares the order of their
        modules, in backward and in recomputation too.
        """
        valid_SB = torch.arange(size)[:, None] < lengths_B
        place_V = valid_SB.flatten().nonzero().flatten()
        return cls(place_V.to(device, non_blocking=True), place_V, valid_SB.numel(), len(lengths_B))

    def bounds(self, ranks: int) -> tuple[int, ...]:
        """Return where each rank's tokens begin among the V, and V; ranks have equal shares of the places."""
        edges = torch.arange(ranks + 1) * (self.num_places // ranks)
        return tuple(torch.searchsorted(self.place_on_cpu_V, edges).tolist())

    def own_places(self, rank: int, ranks: int) -> Tensor:
        """Return the places of a rank's tokens among the places of that rank, int64."""
        bounds = self.bounds(ranks)
        return self.place_V[bounds[rank] : bounds[rank + 1]] - rank * (self.num_places // ranks)

    def without(self, context: "StepContext", ranks: int) -> "StepContext":
        """Return the context of the V tokens; `ranks`: over which the micro batch's places are spread."""
        index_T, ids_T, place_V = context.token_index_T, context.token_ids_T, self.place_V
        position_T = context.position_T
        return replace(
            context,
            token_index_T=place_V if index_T is None else index_T.to(place_V.device)[place_V],
            token_ids_T=None if ids_T is None else ids_T.to(place_V.device)[place_V],
            position_T=(
                place_V // self.num_sequences
                if position_T is None
                else position_T.to(place_V.device)[place_V]
            ),
            sequence_T=place_V % self.num_sequences,
            bounds=self.bounds(ranks),
            padding=None,
        )


@dataclass(frozen=True)
class SourceTokens:
    """The tokens of an encoder_decoder's encoder in a micro batch, as `StepContext` holds the decoder's."""

    token_index_T: Tensor
    token_ids_T: Tensor
    padding: Padding | None = None
    position_T: Tensor | None = None


OF_MICRO_BATCH = (
    "token_index_T",
    "token_ids_T",
    "position_T",
    "sample_index_B",
    "micro_batch",
    "num_rollouts",
    "padding",
    "source",
    "observations",
    "routings",
    "scores",
)


@dataclass
class StepContext:
    """What the layers know about the current micro batch; the training loop sets it.

    All layers of a model share one object. Tokens are ordered by position: token s * B + b is position s of
    sequence b.

    aux_scale: multiplies the gradient of the auxiliary losses, see `attached_losses`. token_index_T:
    int64, each token's index in the data of the whole run, the key of every random draw; None: tokens are
    numbered from 0. token_ids_T: int64, the token ids. position_T: see `position`. sample_index_B: int64,
    the sample number of each sequence; None: one sequence. measure_gradients: whether this step measures the
    shares of the auxiliary losses' gradients, see `gradient_share`. timers: of the layers' stages; None: not
    measured. compute_timer: of this rank's own work. micro_batch: its number in the run; data-parallel ranks
    take micro batches in turn.
    num_rollouts: G, if an objective has every sequence routed several times; sequence g * B / G + b is then
    rollout g of sequence b. data_group: the ranks whose micro batches form the batch; None: this micro batch
    alone. source: the tokens of an encoder_decoder's encoder; the other fields are the decoder's.
    observations, routings: what each layer keeps of its pass, see `MoELayer`, by the layer's `id`. scores: of
    this rank's tokens in each layer that a residual reads, fp32 [T, E] with gradient, by the layer's number.

    padding: the places that are not tokens; None: all are. A layer removes them before its router, so parts
    see tokens only. They then get sequence_T, int64, the sequence of each token, and bounds: where the tokens
    of each tensor-parallel rank begin, and their number.
    """

    seed: int = 0
    step: int = 0
    aux_scale: float = 1.0
    token_index_T: Tensor | None = None
    token_ids_T: Tensor | None = None
    position_T: Tensor | None = None
    sample_index_B: Tensor | None = None
    micro_batch: int = 0
    num_rollouts: int = 1
    data_group: dist.ProcessGroup | None = None
    measure_gradients: bool = False
    timers: StageTimers | None = None
    compute_timer: LocalComputeTimer = field(default_factory=lambda: LocalComputeTimer(torch.device("cpu")))
    padding: Padding | None = None
    source: SourceTokens | None = None
    observations: dict[int, Any] = field(default_factory=dict)
    routings: dict[int, Any] = field(default_factory=dict)
    scores: dict[int, Tensor] = field(default_factory=dict)
    sequence_T: Tensor | None = None
    bounds: tuple[int, ...] | None = None

    def of_micro_batch(self) -> dict[str, Any]:
        """Return the fields that belong to one micro batch, to set them again before its backward pass."""
        return {name: getattr(self, name) for name in OF_MICRO_BATCH}

    def of_source(self) -> "StepContext":
        """Return the context of the encoder's layers in an encoder_decoder."""
        source = self.source
        assert source is not None, "the encoder's tokens are not set"
        return replace(
            self,
            token_index_T=source.token_index_T,
            token_ids_T=source.token_ids_T,
            position_T=source.position_T,
            padding=source.padding,
        )

    def token_index(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return each token's index in the data, int64 [T]."""
        if self.token_index_T is None:
            return torch.arange(num_tokens, device=device)
        return self.token_index_T.to(device)

    def position(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return each token's position, from 0 in its sequence, or in its document with
        `data.document_aware`, int64 [T].

        It is the position that learned and rotary positions get, in generation too.
        """
        if self.position_T is None:
            return torch.arange(num_tokens, device=device) // self.num_sequences
        return self.position_T.to(device)

    @property
    def num_sequences(self) -> int:
        """The number of sequences B."""
        return 1 if self.sample_index_B is None else self.sample_index_B.numel()

    def sequence(self, num_tokens: int, device: torch.device) -> Tensor:
        """Return the sequence of each token, from 0 to B - 1, int64 [T]."""
        if self.sequence_T is not None:
            return self.sequence_T.to(device)
        return torch.arange(num_tokens, device=device) % self.num_sequences

    def draw_key(self, layer: int, purpose: str) -> int:
        """Return the key of this step's draws for one purpose in one layer, for `rng.uniform`."""
        return rng.key(self.seed, self.step, layer, purpose)
