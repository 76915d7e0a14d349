"""The router: the stages between the hidden states and the Routing, in their order."""

import torch
from torch import Tensor, nn

from megamoe.config import PartChoice
from megamoe.config.schema import RouterConfig
from megamoe.moe.part import Dims, Part, StepContext
from megamoe.moe.routing import Routing
from megamoe.registry import get_part


def build_part(choice: PartChoice, dims: Dims) -> Part:
    """The module of a part that the configuration chose."""
    part: Part = get_part(choice.kind, choice.name)(choice.options, dims)
    return part


class Router(nn.Module):
    """score -> restrict -> gate -> select -> capacity, all in fp32 whatever the model's dtype."""

    def __init__(self, config: RouterConfig, dims: Dims) -> None:
        super().__init__()
        self.scorer = build_part(config.scorer, dims)
        self.restrictions = nn.ModuleList([build_part(choice, dims) for choice in config.restrictions])
        self.gate = build_part(config.gate, dims)
        self.selector = build_part(config.selector, dims)
        self.capacity = build_part(config.capacity, dims)

    def forward(self, hidden_TH: Tensor, context: StepContext) -> Routing:
        """[T, H] in any float dtype -> Routing."""
        with torch.autocast(hidden_TH.device.type, enabled=False):
            scores_TE = self.scorer(hidden_TH.float(), context)
            candidates_TE = self._candidates(scores_TE, context)
            probs_TE = self.gate(scores_TE, candidates_TE)
            wanted = self.selector(probs_TE, scores_TE, candidates_TE)
            keep_N = self.capacity(wanted, hidden_TH.shape[0], self.selector.num_choices)
        pairs = wanted if keep_N is None else wanted.keep(keep_N)
        return Routing(wanted, pairs, scores_TE, probs_TE, candidates_TE)

    def _candidates(self, scores_TE: Tensor, context: StepContext) -> Tensor | None:
        candidates_TE = None
        for restriction in self.restrictions:
            allowed_TE = restriction(scores_TE, context)
            candidates_TE = allowed_TE if candidates_TE is None else candidates_TE & allowed_TE
        return candidates_TE
