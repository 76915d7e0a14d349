"""What every part of the MoE layer is made of: its dimensions, the step's context, a common base."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Dims:
    """The sizes that a part may need when it is built.

    layer: the block's number, from 1. init_std: standard deviation of weights at the start.
    """

    hidden_size: int
    num_experts: int
    layer: int = 1
    init_std: float = 0.02
    seed: int = 0


@dataclass
class StepContext:
    """What the layers must know of the micro batch under way; the training loop writes it.

    One object is shared by all layers of a model. aux_scale multiplies the gradient of the
    auxiliary losses (their declared mean over micro batches, see `layer.attach_loss`).
    token_index_T: int64, each token's place in the whole run's data, which keys every random draw;
    None: the tokens are numbered from 0.
    """

    seed: int = 0
    step: int = 0
    aux_scale: float = 1.0
    token_index_T: Tensor | None = None

    def token_index(self, num_tokens: int, device: torch.device) -> Tensor:
        """int64 [T]."""
        if self.token_index_T is None:
            return torch.arange(num_tokens, device=device)
        return self.token_index_T.to(device)


class Part(nn.Module):
    """Base of scorers, restrictions, gates, selectors, capacities and losses.

    A subclass adds a nested dataclass `Config` and its `forward`; `register(kind, name)` makes it
    known. The signatures of `forward`, by kind:

        scorer       (hidden_TH fp32, context) -> scores_TE fp32
        restriction  (scores_TE, context) -> candidates_TE bool
        gate         (scores_TE, candidates_TE | None) -> probs_TE
        selector     (probs_TE, scores_TE, candidates_TE | None) -> Pairs
        capacity     (Pairs, num_tokens, num_choices) -> keep_N bool, or None: all survive
        loss         (Routing) -> scalar fp32, not multiplied by its weight
    """

    @dataclass
    class Config:
        """No options."""

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__()
        self.config = config
        self.dims = dims
