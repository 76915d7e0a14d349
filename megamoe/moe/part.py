"""What every part of the MoE layer is made of: its surroundings, the step's context, a common base."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.config.schema import MoEConfig
from megamoe.kernels.choice import DEFAULT_KERNELS, Kernels
from megamoe.moe import rng


@dataclass(frozen=True)
class Dims:
    """What a part may need to know when it is built.

    layer: the block's number, from 1. init_std, init_scale: how weights start, see `rng.start_weight`.
    vocab_size: rows of the embedding, None where there are no token ids. expert_parallel: ranks that
    share one set of experts. follows_data: see `process_groups.ParallelGroups`. score_function: what the
    router's score function provides. num_choices: the k that the selector counts with.
    kernels: the model's choice, for the passes of `megamoe.kernels` and the draws of `rng`.
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
    kernels: Kernels = DEFAULT_KERNELS

    def start(self, weight: Tensor, purpose: str) -> None:
        """Draw a weight's start in place; it depends on (seed, layer, purpose) alone."""
        key = rng.key(self.seed, 0, self.layer, purpose)
        rng.start_weight(weight, key, self.init_std, self.init_scale)


@dataclass
class StepContext:
    """What the layers must know of the micro batch under way; the training loop writes it.

    One object is shared by all layers of a model. Tokens stand position by position: token s * B + b is
    position s of sequence b.

    aux_scale: multiplies the gradient of the auxiliary losses (their declared mean over micro batches,
    see `layer.attach_loss`). token_index_T: int64, each token's place in the whole run's data, which keys
    every random draw; None: the tokens are numbered from 0. token_ids_T: int64, the vocabulary's.
    sample_index_B: int64, the number in the run's data of each sequence; None: one sequence.
    micro_batch: its number in the run; micro batches are dealt to the data-parallel ranks in turn.
    num_rollouts: G, where an objective has every sequence routed several times: sequence g * B / G + b
    is then routing g of sequence b. data_group: the ranks whose micro batches together are the batch;
    None: this one alone.
    """

    seed: int = 0
    step: int = 0
    aux_scale: float = 1.0
    token_index_T: Tensor | None = None
    token_ids_T: Tensor | None = None
    sample_index_B: Tensor | None = None
    micro_batch: int = 0
    num_rollouts: int = 1
    data_group: dist.ProcessGroup | None = None

    def token_index(self, num_tokens: int, device: torch.device) -> Tensor:
        """int64 [T]."""
        if self.token_index_T is None:
            return torch.arange(num_tokens, device=device)
        return self.token_index_T.to(device)

    @property
    def num_sequences(self) -> int:
        """B."""
        return 1 if self.sample_index_B is None else self.sample_index_B.numel()

    def sequence(self, num_tokens: int, device: torch.device) -> Tensor:
        """int64 [T]: the sequence of each token, from 0 to B - 1."""
        return torch.arange(num_tokens, device=device) % self.num_sequences

    def draw_key(self, layer: int, purpose: str) -> int:
        """The key of this step's draws for a purpose of one layer, for `rng.uniform`."""
        return rng.key(self.seed, self.step, layer, purpose)


Constraint = tuple[nn.Parameter, Callable[[Tensor], Tensor]]

# What a part may provide beside its extras, with the words that messages use. A plugin may add its own names.
CAPABILITIES = {
    "log_probs": "gives log p as its scores",  # scorer
    "softmax_of_scores": "is a softmax",  # score function
    "plain_softmax": "is a softmax of temperature 1",
    "sums_to_1": "makes the p of a token's candidates sum to 1",
    "monotone": "makes p that grow with the scores of a token",
    "elementwise": "makes the p of an expert from its own score alone",
    "bias": "moves the choice by a bias",
    "mask": "takes experts away",  # every mask
    "by_probs": "goes by p, not by ranking_TE",  # mask
    "best_k": "chooses a fixed number of the best experts",  # selector
    "by_ranking": "chooses by ranking_TE alone",
    "drawn": "draws the experts",
    "assigned": "solves an assignment of tokens to experts",
    "over_all_ranks": "chooses for the micro batches of all data-parallel ranks together",
    "by_experts": "lets the experts choose, so that a token may get none",
    "even_load": "gives every expert as many tokens",
    "even_first_choices": "gives every expert as many first choices",
    "normalised": "makes the weights of a token sum to 1",
    "fixed_weights": "gives weights without gradient",
    "dropless": "drops nothing",  # capacity
}


@dataclass(frozen=True)
class Example:
    """options: of the part. beside: more of the section `moe`, for a part that defaults do not show well."""

    options: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)


class Part(nn.Module):
    """Base of scorers, masks, score functions, selectors, capacities and losses.

    A subclass adds a nested dataclass `Config` and its `forward`; `register(kind, name)` makes it
    known. The signatures of `forward`, by kind (`Scored`, `Pairs` and `Routing` are in `routing`):

        scorer          (hidden_TH fp32, context) -> scores_TE fp32, or (scores_TE, extras by name)
        mask            (Scored, context) -> candidates_TE bool, or None: this step all are
        score_function  (scores_TE, candidates_TE | None) -> probs_TE
        selector        (Scored, context) -> Pairs
        capacity        (Pairs, Scored, context) -> keep_N bool, or None: all survive
        loss            (Routing, context) -> scalar fp32, not multiplied by its weight

    A scorer scores each token by itself, without a look at the others: where tensor parallelism spreads a
    micro batch's tokens over ranks, it sees its rank's alone. The other stages and the losses always see the
    whole micro batch. An extra with a row for each token has a name whose shape suffix begins with T.

    Of a scorer's extras the router reads one: ranking_TE, fp32 without gradient, takes the place of scores
    and p in what choices are made by (`Scored.ranking_TE`); the weights stay the score function's.

    Parts know each other by what they declare, never by name or class. A capability is a word: the name of
    an extra, one of `CAPABILITIES`, or a word of a plugin's own. `composition.check_parts` compares what the
    parts provide, require and refuse. `examples.example_trees` adds the neighbours that a part requires.
    """

    @dataclass
    class Config:
        """No options."""

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        """The capabilities of the part with these options: the names of its extras among them."""
        return set()

    @classmethod
    def requires(cls, options: Any) -> dict[str, str]:
        """What some part beside it must provide: capability -> why, the end of a sentence."""
        return {}

    @classmethod
    def refuses(cls, options: Any) -> dict[str, str]:
        """What no part beside it may provide: capability -> why."""
        return {}

    @classmethod
    def must_be_required(cls, options: Any) -> dict[tuple[str, str], str]:
        """What some part beside it must require of it: (kind of the other part, capability) -> why."""
        return {}

    @classmethod
    def sizes(cls, options: Any, num_experts: int) -> dict[str, int]:
        """The sizes of its extras by the letters of their shape suffixes, beside T and E."""
        return {}

    @classmethod
    def examples(cls, num_experts: int, num_choices: int) -> list[Example]:
        """Options that show the part in a layer of so many experts, a multiple of 16, about `num_choices` a
        token (at least 2). Tests and benchmarks run all of them.
        """
        return [Example()]

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__()
        self.config = config
        self.dims = dims

    @classmethod
    def check(cls, options: Any, moe: MoEConfig, expert_parallel: int) -> None:
        """Refuse a composition that makes no sense, before anything is built.

        options: this part's Config; moe: all that it would stand among.

        Raises:
            ValueError: what was found, what was expected, the way out; the caller names the key.
        """

    def after_step(self, load_E: Tensor, context: StepContext) -> None:
        """Learn outside the gradient: called after each optimiser step, in training, without gradient.

        load_E: int64, the pairs that the selectors of all ranks wanted in the step's whole batch; -1 for an
        expert that the step's masks closed to every token. What is learned lives in registered
        buffers, which checkpoints save.
        """

    def constraints(self) -> list[Constraint]:
        """Parameters to be projected after each optimiser step, with pure functions fp32 -> fp32."""
        return []


class ScoreFunction(Part):
    """A score function; `bias_E` shifts what the selector and the masks choose by, never p.

    monotone: p of a token's candidates grows with their scores, as c exp(log_values(s)) with a factor c of
    the token. Choices are then made by the scores where there is no bias, because fp32 rounds the p of
    scores far apart to the same 1 or 0. elementwise: p of an expert depends on its own score alone (sigmoid;
    c is 1), so that for a monotone score function the scores also order the pairs of different tokens. Both
    are False by default: choices are made by p.
    """

    monotone: bool = False
    elementwise: bool = False

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        """What the class declares; "bias" where a bias moves the choice."""
        return {word for word in ("monotone", "elementwise") if getattr(cls, word)}

    @property
    def bias_E(self) -> Tensor | None:
        """fp32 [E], or None."""
        return None

    @property
    def over_all(self) -> bool:
        """Whether p of a candidate is its value over all experts, whatever the masks took away.

        The router then computes the score function once: p is the affinities, with 0 where an expert is no
        candidate.
        """
        return self.elementwise

    def log_values(self, scores: Tensor) -> Tensor:
        """log p of a monotone score function, up to a constant of each token: scores, fp32 of any shape ->
        the same.

        Raises:
            NotImplementedError: a score function that declares itself monotone must define it.
        """
        raise NotImplementedError(f"{type(self).__name__} is monotone and must define log_values")


@dataclass(frozen=True)
class Candidates:
    """How many experts a mask leaves to a token in a training step, as (least, most).

    groups: into how many groups of neighbours it cuts the experts. kept: of how many groups it leaves any.
    each: how many experts it leaves of such a group.
    """

    num_experts: int
    groups: int = 1
    kept: tuple[int, int] = (1, 1)
    each: tuple[int, int] = (0, 0)

    @property
    def group_size(self) -> int:
        """Experts of a group."""
        return self.num_experts // self.groups

    @property
    def least(self) -> int:
        """Of all experts."""
        return self.kept[0] * self.each[0]

    @property
    def most(self) -> int:
        """Of all experts."""
        return self.kept[1] * self.each[1]

    @property
    def one_group(self) -> bool:
        """Whether they are all experts of one group of several."""
        return self.groups > 1 and self.kept[1] == 1 and self.each[0] == self.group_size


class Mask(Part):
    """A mask; one that keeps all tokens on their own rank says so, and nothing is sent.

    One that takes nothing away in a step returns None, so that the score function is not computed twice.

    step_wide: its mask is one for all tokens of a micro batch, whatever their scores. Such a mask must stand
    before the others (`composition.refuse_late_masks`), which then choose among what it leaves; after them it
    could take away all that they left to a token. It also makes E smaller for the capacity, which a mask that
    goes by token never does: otherwise a router that sends all tokens to a few experts would raise their
    capacity.
    random: it draws once a step, so that two of its class would make the same draw.
    """

    step_wide: bool = False
    random: bool = False

    @classmethod
    def num_candidates(cls, options: Any, num_experts: int, expert_parallel: int = 1) -> Candidates:
        """Bounds on what it leaves to a token in a training step; by default, it may leave all experts."""
        return Candidates(num_experts, each=(0, num_experts))

    def closed_E(self, context: StepContext) -> Tensor | None:
        """bool [E], on the CPU: experts that no token of any rank can choose in this training step.

        None: none is closed.
        """
        return None

    def keeps_tokens_local(self, context: StepContext) -> bool:
        """Whether, on all ranks alike, this step's candidates are the experts of each token's own rank."""
        return False


class Selector(Part):
    """A selector, with the k that capacity counts with."""

    @property
    def num_choices(self) -> int:
        """k; 1 where it varies by token."""
        return 1

    @property
    def mean_choices(self) -> float:
        """Experts of a token on average, where that is known beforehand; k, where it is not."""
        return self.num_choices

    @classmethod
    def wanted(cls, options: Any, num_experts: int) -> int:
        """How many experts every token asks for, at least: k, unless the number varies by token."""
        return cls(options, Dims(1, num_experts)).num_choices

    @classmethod
    def takes_all(cls, options: Any, num_candidates: int) -> bool:
        """Whether a training step sends every token to each of so many candidates."""
        return cls.wanted(options, num_candidates) >= num_candidates

    def after_drops(self, pairs: Any) -> Any:
        """The Pairs that the capacity left, with their final weights."""
        return pairs


class Objective(Part):
    """A loss that needs the model's token losses: (Routing, context, token_losses_T) -> scalar fp32.

    It stands among the losses; the training step calls it after the model's forward pass.
    token_losses_T: fp32, without gradient, 0 where no loss is taken.
    """

    @property
    def num_rollouts(self) -> int:
        """How many times each sequence is routed in a forward pass."""
        return 1
