"""The base classes of the MoE layer's parts, and the sizes that a part is built with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megamoe.config.schema import MoEConfig
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.moe import rng
from megamoe.moe.capabilities import CAPABILITIES as CAPABILITIES
from megamoe.moe.context import StepContext as StepContext


@dataclass(frozen=True)
class Dims:
    """The sizes and settings that a part may need when it is built.

    num_experts: the experts that the router chooses among. num_zero: how many of them, the last ones, compute
    nothing. layer: the block's number, from 1. init_std, init_scale: how weights are initialised, see
    `rng.init_weight`. vocab_size: rows of the embedding; None where there are no token ids. expert_parallel:
    ranks that share one set of experts. follows_data: see `process_groups.ParallelGroups`. score_function:
    the capabilities of the router's score function. num_choices: the selector's k, as in
    `Selector.num_choices`. kernels: the model's choice, for the passes of `megamoe.kernels` and the draws of
    `rng`. width: muP's width factor (`config.mup`); weights that read the hidden states start with init_std /
    width.
    """

    hidden_size: int
    num_experts: int
    layer: int = 1
    init_std: float = 0.02
    init_scale: float | None = None
    seed: int = 0
    vocab_size: int | None = None
    expert_parallel: int = 1
    follows_data: bool = True
    score_function: frozenset[str] = frozenset({"softmax_of_scores", "sums_to_1"})
    num_choices: int = 1
    num_zero: int = 0
    kernels: Kernels = DEFAULT_KERNELS
    width: float = 1.0

    def init_weight(self, weight: Tensor, purpose: str) -> None:
        """Initialise a weight in place; the result depends on (seed, layer, purpose) alone."""
        key = rng.key(self.seed, 0, self.layer, purpose)
        reads = weight.shape[-1] == self.hidden_size
        rng.init_weight(weight, key, self.init_std / (self.width if reads else 1.0), self.init_scale)


Constraint = tuple[nn.Parameter, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Example:
    """Options of a plugin's part, for tests and benchmarks: what its class method `examples(num_experts,
    num_choices)` returns a list of. beside: more of the section `moe`, if the defaults do not suit the part.
    """

    options: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)


class Part(nn.Module):
    """Base class of scorers, residuals, masks, score functions, selectors, capacities and losses.

    A subclass has a nested dataclass `Config` and a `forward`; `register(kind, name)` registers it. The
    signatures of `forward`, by kind (`Scored`, `Pairs` and `Routing` are in `routing`):

        scorer          (hidden_TH fp32, context) -> scores_TE fp32, or (scores_TE, extras by name);
                        with `takes_any_dtype` the tokens come in the model's dtype
        residual        (scores_TE, before_TE | None, context) -> scores_TE
        mask            (Scored, context) -> candidates_TE bool, or None: all experts in this step
        score_function  (scores_TE, candidates_TE | None) -> probs_TE
        selector        (Scored, context) -> Pairs
        capacity        (Pairs, Scored, context) -> keep_N bool, or None: all are kept, or `CapacitySlots`
        loss            (Routing, context) -> scalar fp32, not multiplied by its weight

    A scorer scores each token independently of the others: under tensor parallelism it and the residual see
    only their own rank's tokens. The other stages and the losses always see the whole micro batch. An extra
    with a row for each token has a name whose shape suffix begins with T.

    The router itself reads one extra, ranking_TE (fp32, without gradient). It replaces scores and p in all
    choices (`Scored.ranking_TE`); the weights are still the score function's.

    A part reads what another part declares, never its name or class. A capability is a word: the name of an
    extra, one of `CAPABILITIES`, or a plugin's own word. `validation.check_parts` compares what parts
    provide, require and refuse.

    Experts without computation (`moe.zero_experts`) are the last ones; a router chooses among all. A part
    that takes all experts to be alike, in load or in place, declares `experts_alike`: it is refused beside
    them.
    """

    takes_any_dtype: ClassVar[bool] = False
    experts_alike: ClassVar[bool] = False
    needs_token_losses: ClassVar[bool] = False  # of a loss: it is an `Objective`

    @dataclass
    class Config:
        """No options."""

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        """Return the capabilities of the part with these options, including the names of its extras."""
        return set()

    @classmethod
    def requires(cls, options: Any) -> dict[str, str]:
        """Return what another part must provide: capability -> reason (the end of a sentence)."""
        return {}

    @classmethod
    def refuses(cls, options: Any) -> dict[str, str]:
        """Return what no other part may provide: capability -> reason."""
        return {}

    @classmethod
    def must_be_required(cls, options: Any) -> dict[tuple[str, str], str]:
        """Return what another part must require of this one: (kind of that part, capability) -> reason."""
        return {}

    @classmethod
    def sizes(cls, options: Any, num_experts: int) -> dict[str, int]:
        """Return the sizes of its extras by the letter in their shape suffix, other than T and E."""
        return {}

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__()
        self.config = config
        self.dims = dims

    @classmethod
    def check(cls, options: Any, moe: MoEConfig, expert_parallel: int) -> None:
        """Refuse a combination that makes no sense, before anything is built.

        options: this part's Config. moe: the whole section.

        Raises:
            ValueError: what was found, what was expected, and the way out; the caller adds the key.
        """

    def attach(self, layer: Any) -> None:
        """Register hooks on the MoE layer (`layer.MoELayer`) that the part belongs to, once it is built.

        For a part that needs more than `forward` gets, such as the experts' outputs. A reference to the layer
        must not become a submodule: keep it in a tuple.
        """

    def draws(
        self,
        context: StepContext,
        purpose: str,
        tokens_TX: Tensor,
        columns: int,
        draw: Callable[..., Tensor] = rng.uniform,
    ) -> Tensor:
        """Return this step's random numbers for these tokens, fp32 [T, columns].

        purpose: draws of different purposes are independent. draw: a function of `rng`.
        """
        index_T = context.token_index(len(tokens_TX), tokens_TX.device)
        draw_key = context.draw_key(self.dims.layer, purpose)
        return draw(draw_key, index_T, columns, kernels=self.dims.kernels)

    def after_step(self, load_E: Tensor, context: StepContext) -> None:
        """Update learned buffers without gradient; called after each optimiser step of training.

        load_E: int64, the pairs wanted by the selectors of all ranks in the step's whole batch; -1 for an
        expert that the step-wide masks closed. The state must be in registered buffers, so that checkpoints
        save it.
        """

    def metrics(self) -> dict[str, Tensor]:
        """Return the part's own numbers by name, such as a temperature; scalars, logged once a step.

        They must come from weights and buffers alone, not from tokens, and never wait for the device. The
        names are the same in every step and on every rank. Under ZeRO 3 the weights are whole here.
        """
        return {}

    def constraints(self) -> list[Constraint]:
        """Return (parameter, projection) pairs, applied after each optimiser step; pure functions fp32 ->
        fp32.
        """
        return []


def mean_row_norm(weight_ED: Tensor) -> Tensor:
    """Return the mean over experts of the L2 norm of their rows, a scalar fp32, for `Part.metrics`."""
    return torch.linalg.vector_norm(weight_ED.float(), dim=1).mean()


class Residual(Part):
    """Base class of residuals, which change a layer's scores by those of the MoE layer before.

    reads_before: later layers read this one's scores, and `forward` gets those of the last MoE layer before
    that a residual reads too and that has as many experts (`config.layer_kinds.scores_before`). They are this
    rank's tokens, as for a scorer, and carry gradient.
    """

    reads_before: ClassVar[bool] = True


class ScoreFunction(Part):
    """Base class of score functions; `bias_E` shifts what the selector and the masks choose by, never p.

    monotone: the p of a token's candidates are c exp(log_values(s)), with a factor c of the token, so they
    grow with the scores. Choices are then made by the scores if there is no bias, because fp32 rounds p to 0
    or 1. elementwise: the p of an expert depends only on its own score (sigmoid; c is 1). The scores of a
    monotone elementwise function also order the pairs of different tokens. Both are False by default: choices
    are made by p.
    """

    monotone: bool = False
    elementwise: bool = False

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        """Return the properties that the class declares."""
        return {word for word in ("monotone", "elementwise") if getattr(cls, word)}

    @classmethod
    def held_mean(cls, options: Any) -> float | None:
        """Return the mean number of experts that compute a token, if the score function holds it."""
        return None

    @property
    def bias_E(self) -> Tensor | None:
        """The bias, fp32 [E], or None."""
        return None

    @property
    def over_all(self) -> bool:
        """Whether the p of a candidate is its value over all experts, regardless of the masks.

        The router then computes the score function once: p is the affinities, with 0 for experts that are no
        candidates.
        """
        return self.elementwise

    @property
    def small_slope(self) -> float | None:
        """The a of log p = a s + c, with a c of the token, wherever p is below 1e-15; None: it is not known.

        Renormalised weights need it where all p of the chosen experts underflow.
        """
        return None

    def log_values(self, scores: Tensor) -> Tensor:
        """Return log p of a monotone score function, up to a constant per token; any shape, fp32.

        Raises:
            NotImplementedError: a score function that declares itself monotone must define it.
        """
        raise NotImplementedError(f"{type(self).__name__} is monotone and must define log_values")


@dataclass(frozen=True)
class Candidates:
    """How many experts a mask leaves to a token in a training step, as (least, most).

    groups: the number of groups of neighbouring experts. kept: the number of groups of which it leaves any
    expert. each: the number of experts that it leaves in such a group.
    """

    num_experts: int
    groups: int = 1
    kept: tuple[int, int] = (1, 1)
    each: tuple[int, int] = (0, 0)

    @property
    def group_size(self) -> int:
        """The number of experts in a group."""
        return self.num_experts // self.groups

    @property
    def least(self) -> int:
        """The least number of candidates of a token."""
        return self.kept[0] * self.each[0]

    @property
    def most(self) -> int:
        """The largest number of candidates of a token."""
        return self.kept[1] * self.each[1]

    def and_also(self, other: "Candidates") -> "Candidates":
        """Return bounds on what both masks leave, which have the same groups."""
        kept = min(self.kept[0], other.kept[0]), min(self.kept[1], other.kept[1])
        each = min(self.each[0], other.each[0]), min(self.each[1], other.each[1])
        return Candidates(self.num_experts, self.groups, kept, each)

    @property
    def one_group(self) -> bool:
        """Whether the candidates are all experts of one of several groups."""
        return self.groups > 1 and self.kept[1] == 1 and self.each[0] == self.group_size


class Mask(Part):
    """Base class of masks.

    A mask that removes nothing in a step returns None, so that the score function is not computed twice.

    step_wide: the mask is the same for all tokens of a micro batch, whatever their scores. Such a mask must
    come before the others (`validation.late_mask_problems`); after them it could remove a token's last
    candidates. It also lowers the E that the capacity counts with. A mask that depends on the token never
    does: otherwise a router that sends all tokens to a few experts would raise their capacity.

    random: the mask draws once a step, so two of the same class would make the same draw.
    """

    step_wide: bool = False
    random: bool = False

    @classmethod
    def num_candidates(cls, options: Any, num_experts: int, expert_parallel: int = 1) -> Candidates:
        """Return bounds on a token's candidates in a training step; by default it may leave all experts."""
        return Candidates(num_experts, each=(0, num_experts))

    @classmethod
    def group_limit(cls, options: Any) -> tuple[int, int] | None:
        """Return (groups of neighbouring experts, how many of them a token's experts lie in at most), if the
        mask limits them for each token.
        """
        return None

    def closed_E(self, context: StepContext) -> Tensor | None:
        """Return the experts that no token of any rank can choose in this training step.

        The result is bool [E] on the CPU, or None if no expert is closed.
        """
        return None

    def keeps_tokens_local(self, context: StepContext) -> bool:
        """Whether each token's candidates are on its own rank in this step; the same on all ranks."""
        return False


class Selector(Part):
    """Base class of selectors."""

    @property
    def num_choices(self) -> int:
        """The k that the capacity counts with; 1 if the number varies by token."""
        return 1

    @property
    def mean_choices(self) -> float:
        """The mean number of experts of a token if it is known in advance, otherwise k."""
        return self.num_choices

    @classmethod
    def wanted(cls, options: Any, num_experts: int) -> int:
        """Return the least number of experts that a token wants: k, unless the number varies by token."""
        return cls(options, Dims(1, num_experts)).num_choices

    @classmethod
    def takes_all(cls, options: Any, num_candidates: int) -> bool:
        """Whether a training step sends every token to all of this many candidates."""
        return cls.wanted(options, num_candidates) >= num_candidates

    @classmethod
    def replays(cls, options: Any) -> bool:
        """Whether `replayed` is defined for these options; by default, whether the class defines it."""
        return cls.replayed is not Selector.replayed

    def replayed(self, scored: Any, expert_TK: Tensor, count_T: Tensor) -> Any:
        """Return the Pairs of choices made elsewhere, with the weights that `forward` gives to such choices.

        expert_TK: int64, the first count_T (int64) of a token's row are its experts in order of choice; the
        others are valid experts that must have no effect. For the choices that `forward` made, the result
        and its gradients are bit for bit those of `forward`.

        Raises:
            NotImplementedError: unless `replays`.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot replay choices")

    def after_drops(self, pairs: Any) -> Any:
        """Return the pairs that the capacity kept, with their final weights."""
        return pairs
