"""The router: the stages from the hidden states to the Routing."""

import functools
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megamoe.config import PartChoice
from megamoe.config.schema import MoELayerConfig, RouterConfig
from megamoe.config.shapes import routed_experts
from megamoe.errors import UserError
from megamoe.moe.capabilities import capabilities
from megamoe.moe.guarded import guarded
from megamoe.moe.part import Candidates, Dims, Part, Residual, ScoreFunction, Selector, StepContext
from megamoe.moe.routing import LOWEST, CapacitySlots, Pairs, Routing, Scored, has_row_per_token
from megamoe.moe.token_sharding import TokenSharding
from megamoe.registry import described, failure_of, get_part, is_ours


def build_part(choice: PartChoice, dims: Dims) -> Any:
    """Build the part that the configuration chose; its class is of its kind's base class.

    Raises:
        UserError: if a plugin's part fails in __init__ or does not call that of `Part`, or if it has a
            parameter without dimensions, which the optimiser cannot partition.
    """
    part_class, named = get_part(choice.kind, choice.name), f"{choice.kind} {choice.name!r}"
    try:
        part: Part = part_class(choice.options, dims)
    except Exception as error:
        if is_ours(part_class) or isinstance(error, UserError):
            raise
        counted = torch.get_default_device().type == "meta"
        way_out = "; parts are also built on torch's meta device, which holds no numbers, to be counted"
        problem = failure_of(part_class, error) + (way_out if counted else "")
        raise UserError(f"the __init__ of the {named} failed{problem}") from error
    if "_parameters" not in vars(part):
        way_out = "does not call super().__init__(config, dims); call it first"
        raise UserError(f"{described(part_class)}: its __init__ {way_out}")
    for parameter, weight in part.named_parameters():
        if weight.dim() == 0:
            raise UserError(f"the {named}: {parameter} is a parameter of shape []; a scalar needs shape [1]")
    return guarded(part, choice.kind)


def mean_choices(moe: MoELayerConfig) -> float:
    """Return the mean number of experts that compute a token; 1 if the selector does not know it.

    With experts without computation it is the score function's target (`held_mean`), if there is one.
    Otherwise every expert is taken to be chosen equally often.
    """
    with torch.device("meta"):
        selector = build_part(moe.router.selector, Dims(1, routed_experts(moe)))
    score_function = moe.router.score_function
    held: float | None = get_part("score_function", score_function.name).held_mean(score_function.options)
    if moe.zero_experts.total and held is not None:
        return held
    return float(selector.mean_choices) * moe.num_experts / routed_experts(moe)


def _least_candidates(config: RouterConfig, dims: Dims) -> int:
    """Return how many candidates the masks leave to every token at least: of one mask, what it declares.

    Of several masks together it is not known; 0.
    """
    if len(config.masks) != 1:
        return 0 if config.masks else dims.num_experts
    (choice,) = config.masks
    left: Candidates = get_part("mask", choice.name).num_candidates(
        choice.options, dims.num_experts, dims.expert_parallel
    )
    return left.least


class Choices(Protocol):
    """Stands between a router and its selector, to record the choices or to replace them."""

    def select(self, selector: Selector, scored: Scored, context: StepContext) -> Pairs:
        """Return the pairs of the micro batch."""
        ...


class Router(nn.Module):
    """scorer -> residual -> masks -> score function -> selector -> capacity, in fp32 whatever the dtype.

    token_sharding: if a micro batch's tokens are spread over ranks, each rank scores its own tokens, and
    every rank runs the later stages for all of them. choices: None unless choices are recorded or replayed.
    """

    def __init__(self, config: RouterConfig, dims: Dims, token_sharding: TokenSharding | None = None) -> None:
        super().__init__()
        self.token_sharding = token_sharding or TokenSharding(None)
        self.choices: Choices | None = None
        dims = replace(dims, score_function=frozenset(capabilities(config.score_function)))
        self.selector: Selector = build_part(config.selector, dims)
        self.dims = replace(dims, num_choices=self.selector.num_choices)  # for all that stand beside it
        self.scorer: Part = build_part(config.scorer, self.dims)
        self.residual: Residual = build_part(config.residual, self.dims)
        self.masks: Any = nn.ModuleList([build_part(choice, self.dims) for choice in config.masks])
        self.least_candidates = _least_candidates(config, self.dims)
        self.score_function: ScoreFunction = build_part(config.score_function, self.dims)
        self.capacity: Part = build_part(config.capacity, self.dims)

    def forward(self, hidden_TH: Tensor, context: StepContext, before_TE: Tensor | None = None) -> Routing:
        """Take this rank's tokens, [T, H] in any float dtype; return the whole micro batch's Routing.

        before_TE: their scores in the layer before, see `Residual`.
        """
        with torch.autocast(hidden_TH.device.type, enabled=False):
            scores_TE, extras = self._scores(hidden_TH, context, before_TE)
            scored = self._scored(scores_TE, extras)
            self._restrict(scored, context)
            wanted = pairs = self._select(scored, context)
            kept = self.capacity(wanted, scored, context)
            if isinstance(kept, CapacitySlots):
                pairs = self._in_slots(wanted, kept, scored)
            elif kept is not None:
                pairs = self.selector.after_drops(wanted.keep(kept))
        is_local = any(mask.keeps_tokens_local(context) for mask in self.masks)
        slots = kept.size if isinstance(kept, CapacitySlots) else None
        return Routing(**vars(scored), wanted=wanted, pairs=pairs, is_local=is_local, slots=slots)

    def _in_slots(self, wanted: Pairs, slots: CapacitySlots, scored: Scored) -> Pairs:
        """Return the pairs in fixed shares; of one without a place the weight is 0, for `after_drops`."""
        dropped_N = ~slots.kept_N()
        log_N = None if wanted.log_N is None else wanted.log_N.masked_fill(dropped_N, LOWEST)
        kept = replace(wanted, weight_N=wanted.weight_N.masked_fill(dropped_N, 0.0), log_N=log_N)
        pairs = self.selector.after_drops(kept)
        return slots.filled(pairs, scored.num_tokens, scored.num_experts)

    def _select(self, scored: Scored, context: StepContext) -> Pairs:
        if self.choices is None:
            return self.selector(scored, context)
        return self.choices.select(self.selector, scored, context)

    def _scores(
        self, hidden_TH: Tensor, context: StepContext, before_TE: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the scores of the whole micro batch, and what else the scorer shows."""
        whole = functools.partial(self.token_sharding.all_gather, context=context)
        if not self.scorer.takes_any_dtype:
            hidden_TH = hidden_TH.float()
        own = self.token_sharding.local_context(context, len(hidden_TH))
        scores_TE = self.scorer(hidden_TH, own)
        scores_TE, extras = scores_TE if isinstance(scores_TE, tuple) else (scores_TE, {})
        if self.residual.reads_before:
            scores_TE = self.residual(scores_TE, before_TE, own)
        scores_TE = whole(scores_TE)
        return scores_TE, {n: whole(extra) if has_row_per_token(n) else extra for n, extra in extras.items()}

    def _scored(self, scores_TE: Tensor, extras: dict[str, Tensor]) -> Scored:
        affinities_TE = self.score_function(scores_TE, None)
        scored = Scored(
            scores_TE,
            affinities_TE,
            affinities_TE,
            affinities_TE,
            extras=extras,
            score_function=self.score_function,
            least_candidates=self.least_candidates,
        )
        scored.ranking_TE = self._ranking_TE(scored)
        return scored

    def _restrict(self, scored: Scored, context: StepContext) -> None:
        kernels = self.dims.kernels
        for mask in self.masks:
            allowed_TE = mask(scored, context)
            if allowed_TE is None:
                continue
            known_TE = scored.candidates_TE
            scored.candidates_TE = allowed_TE if known_TE is None else known_TE & allowed_TE
            scored.ranking_TE = scored.of_candidates_TE(scored.ranking_TE, float("-inf"), kernels)
            if mask.step_wide:
                open_E = allowed_TE[:1].any(dim=0)  # all rows are equal; without tokens, no expert
                scored.open_E = open_E if scored.open_E is None else scored.open_E & open_E
        if scored.candidates_TE is None:
            return
        if self.score_function.over_all:  # p, and so the ranking, is what it was
            scored.probs_TE = scored.of_candidates_TE(scored.affinities_TE, 0.0, kernels)
            return
        scored.probs_TE = self.score_function(scored.scores_TE, scored.candidates_TE)
        if not scored.ranked_by_scores:
            scored.ranking_TE = scored.of_candidates_TE(self._ranking_TE(scored), float("-inf"), kernels)

    def _ranking_TE(self, scored: Scored) -> Tensor:
        """Return what choices are made by, for all experts; see `Scored`."""
        if scored.ranked_by_scores:
            return scored.scores_TE.detach()
        ranking_TE = scored.extras.get("ranking_TE", scored.probs_TE).detach()
        return ranking_TE if self.score_function.bias_E is None else ranking_TE + self.score_function.bias_E
