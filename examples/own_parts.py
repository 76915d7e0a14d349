"""A router of one's own in one file: a scorer with an extra, a mask, a selector, and a loss of the extra.

What the parts declare of themselves is all that the checks, tests and benchmarks of the built-in parts ask
for:

    python tools/list_parts.py --plugin examples/own_parts.py
    python benchmarks/router_share.py --plugin examples/own_parts.py --parts doubtful
    python pretrain_gpt_moe.py --config examples/own_parts.yaml
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.config.schema import MoEConfig
from megamoe.moe.part import Candidates, Dims, Example, Mask, Part, Selector, StepContext
from megamoe.moe.routing import Pairs, Routing, Scored
from megamoe.registry import register


@register("scorer", "doubtful")
class DoubtfulScorer(Part):
    """s = W x, and a doubt of its own for each token, softplus(w x).

    Source: docs/route/writing_parts.md.
    """

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        """The extra, by its name; its suffix T says that it has a row for each token."""
        return {"doubt_T"}

    @classmethod
    def must_be_required(cls, options: Any) -> dict[tuple[str, str], str]:
        """Nothing but a loss teaches the doubt."""
        return {("loss", "doubt_T"): "without which the doubt learns nothing"}

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__(config, dims)
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.hidden_size))
        self.doubt_weight = nn.Parameter(torch.empty(1, dims.hidden_size))
        dims.init_weight(self.weight, "router")
        dims.init_weight(self.doubt_weight, "router doubt")

    def forward(self, hidden_TH: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """[T, H] fp32 -> scores [T, E] fp32, and doubt_T, fp32 [T], at least 0."""
        doubt_T = functional.softplus(hidden_TH @ self.doubt_weight.float().T).squeeze(1)
        return hidden_TH @ self.weight.float().T, {"doubt_T": doubt_T}


@register("mask", "best_block")
class BestBlock(Mask):
    """Each token keeps the block of neighbouring experts that its best one is in.

    Source: docs/route/writing_parts.md.
    """

    @dataclass
    class Config:
        """blocks: into how many blocks the experts are cut."""

        blocks: int = 2

    @classmethod
    def num_candidates(cls, options: Config, num_experts: int, expert_parallel: int = 1) -> Candidates:
        """One whole block; with one expert in it, a softmax over the candidates is refused."""
        size = num_experts // options.blocks
        return Candidates(num_experts, options.blocks, (1, 1), (size, size))

    @classmethod
    def examples(cls, num_experts: int, num_choices: int) -> list[Example]:
        """Two blocks, and four."""
        return [Example(), Example({"blocks": 4})]

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        """Blocks of one size."""
        if options.blocks < 2 or moe.num_experts % options.blocks:
            raise ValueError(f"blocks is {options.blocks}, expected a divisor of {moe.num_experts} above 1")

    def forward(self, scored: Scored, context: StepContext) -> Tensor:
        """bool [T, E]."""
        size = scored.num_experts // self.config.blocks
        block_E = torch.arange(scored.num_experts, device=scored.ranking_TE.device) // size
        return block_E == block_E[scored.ranking_TE.argmax(dim=-1)][:, None]


@register("selector", "by_doubt")
class ByDoubt(Selector):
    """The best expert, and the second where a token's doubt is at least `bound`.

    Source: docs/route/writing_parts.md.
    """

    @dataclass
    class Config:
        """bound: of the doubt."""

        bound: float = 0.5

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        """What some part beside it must provide, and why."""
        return {"doubt_T": "by which a token gets a second expert"}

    def forward(self, scored: Scored, context: StepContext) -> Pairs:
        """One pair or two a token."""
        expert_T2 = scored.ranking_TE.topk(2, dim=-1).indices
        chosen_T2 = torch.ones_like(expert_T2, dtype=torch.bool)
        chosen_T2[:, 1] = scored.extras["doubt_T"].detach() >= self.config.bound
        if scored.candidates_TE is not None:
            chosen_T2 &= scored.candidates_TE.gather(1, expert_T2)
        return Pairs.of_choices(expert_T2, scored.probs_TE.gather(1, expert_T2), chosen_T2)


@register("loss", "honest_doubt")
class HonestDoubt(Part):
    """Mean squared distance between a token's doubt and the entropy of its p.

    Source: docs/route/writing_parts.md.
    """

    @dataclass
    class Config:
        """weight: factor in the total loss."""

        weight: float = 0.01

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        """What some part beside it must provide, and why."""
        return {"doubt_T": "the doubt that is compared with the entropy of p"}

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Scalar fp32; 0 if there are no tokens."""
        entropy_T = torch.special.entr(routing.probs_TE).sum(dim=-1)
        return (routing.extras["doubt_T"] - entropy_T).square().sum() / max(routing.num_tokens, 1)
