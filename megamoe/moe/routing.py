"""What one MoE layer decided for its tokens: plain data, whatever the router.

Shape legend of this room
    T  tokens of the micro batch on this rank     E  experts of the layer
    N  (token, expert) pairs                      K  choices of a token
    H  hidden size                                F  expert FFN hidden size

Top-k, a threshold, expert choice and balanced assignment all come down to the same flat list of
pairs, so everyone downstream (dispatch, losses, metrics) serves any number of experts a token.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Pairs:
    """A flat list of (token, expert) pairs, in token order, then by choice.

    token_N, expert_N, choice_N: int64; choice 0 is a token's first choice. weight_N: fp32, the
    factor on the expert's output, carries gradient to the router.
    """

    token_N: Tensor
    expert_N: Tensor
    weight_N: Tensor
    choice_N: Tensor

    def keep(self, keep_N: Tensor) -> "Pairs":
        """The pairs where the bool mask `keep_N` holds."""
        return Pairs(
            self.token_N[keep_N], self.expert_N[keep_N], self.weight_N[keep_N], self.choice_N[keep_N]
        )


@dataclass
class Routing:
    """One layer's decision on one micro batch.

    wanted: the pairs that the selector chose; pairs: those that the capacity left, which are computed.
    scores_TE: fp32, before restrictions and gate. probs_TE: fp32, the gate's values (a restricted
    expert has exactly 0). candidates_TE: bool, the experts that the restrictions left, or None for all.
    extras: what a scorer hands to a loss of its own, by name.
    """

    wanted: Pairs
    pairs: Pairs
    scores_TE: Tensor
    probs_TE: Tensor
    candidates_TE: Tensor | None = None
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.scores_TE.shape[0]

    @property
    def num_experts(self) -> int:
        """E."""
        return self.scores_TE.shape[1]

    def wanted_counts_E(self) -> Tensor:
        """Pairs wanted by the selector, per expert, int64."""
        return torch.bincount(self.wanted.expert_N, minlength=self.num_experts)

    def counts_E(self) -> Tensor:
        """Pairs computed, per expert, int64: the load."""
        return torch.bincount(self.pairs.expert_N, minlength=self.num_experts)
