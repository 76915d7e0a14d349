"""What every part of the MoE layer is made of: its surroundings, the step's context, a common base."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.config.schema import MoEConfig
from megamoe.moe import rng


@dataclass(frozen=True)
class Dims:
    """What a part may need to know when it is built.

    layer: the block's number, from 1. init_std, init_scale: how weights start, see `draws.start_weight`.
    vocab_size: rows of the embedding, None where there are no token ids. expert_parallel: ranks that
    share one set of experts. follows_data: see `groups.ParallelGroups`. score_function: the name of the
    router's score function. num_choices: the k that the selector counts with.
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
    score_function: str = "softmax"
    num_choices: int = 1

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
        """The key of this step's draws for a purpose of one layer, for `draws.uniform`."""
        return rng.key(self.seed, self.step, layer, purpose)


Constraint = tuple[nn.Parameter, Callable[[Tensor], Tensor]]


class Part(nn.Module):
    """Base of scorers, masks, score functions, selectors, capacities and losses.

    A subclass adds a nested dataclass `Config` and its `forward`; `register(kind, name)` makes it
    known. The signatures of `forward`, by kind (`Scored`, `Pairs` and `Routing` are in `routing`):

        scorer       (hidden_TH fp32, context) -> scores_TE fp32, or (scores_TE, extras by name)
        mask  (Scored, context) -> candidates_TE bool, or None: this step all are
        score function         (scores_TE, candidates_TE | None) -> probs_TE
        selector     (Scored, context) -> Pairs
        capacity     (Pairs, Scored, context) -> keep_N bool, or None: all survive
        loss         (Routing, context) -> scalar fp32, not multiplied by its weight

    A scorer scores each token by itself, without a look at the others: where tensor parallelism spreads a
    micro batch's tokens over ranks, it sees its rank's alone. The other stages and the losses always see the
    whole micro batch. An extra with a row for each token has a name whose shape suffix begins with T.

    Of a scorer's extras the router reads one: ranking_TE, fp32 without gradient, takes the place of scores
    and p in what choices are made by (`Scored.ranking_TE`); the weights stay the score function's.
    """

    @dataclass
    class Config:
        """No options."""

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


class Mask(Part):
    """A mask; one that keeps all tokens on their own rank says so, and nothing is sent.

    One that takes nothing away in a step returns None, so that the score function is not computed twice.

    step_wide: its mask is one for all tokens of a micro batch, whatever their scores. Such a mask must stand
    before the others (`check.check_parts`), which then choose among what it leaves; after them it could take
    away all that they left to a token. It also makes E smaller for the capacity, which a mask that goes by
    token never does: otherwise a router that sends all tokens to a few experts would raise their capacity.
    """

    step_wide: bool = False

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
