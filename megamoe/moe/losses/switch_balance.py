"""`switch_balance`: the load-balancing loss of the Switch Transformer, with three scopes."""

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.kernels.router import balance, largest
from megamoe.moe.losses.common import fractions, mean_over_sequences, probs_shares, shares, wanted_counts
from megamoe.moe.part import Dims, Part, StepContext
from megamoe.moe.routing import Routing, count
from megamoe.moe.validation import refuse_all_chosen, refuse_all_largest, refuse_even_selector
from megamoe.registry import register


@register("loss", "switch_balance")
class SwitchBalance(Part):
    """E * sum_i f_i P_i; 1 at perfect balance. f has no gradient; P has.

    f_i: the fraction of the pairs that go to expert i, so f sums to 1 for any number of experts per token
    (Megatron-Core, DeepSpeed, DeepSeek); with `first_choice`, of first choices only (Switch eq. 5; XMoE). In
    every scope the run's loss is the mean over micro batches and data-parallel ranks.

    micro_batch: f of the wanted pairs and P_i, the mean of p_i, both over the micro batch. p_i is divided by
    the token's sum if that is not 1 (no softmax, or one over all experts under a mask). XMoE's text sums the
    p of first choices only (`probs: first_choice`); its authors' code takes the mean of all.
    sequence: the mean over the micro batch's B sequences of E * sum_i f_bi P_bi, each over its own tokens.
    P_bi: the mean of s_i / sum_j s_j, with s the score function's values over all experts, before any mask.
    f_bi: of the k largest s, without bias and masks (only the largest with `first_choice`); of a score
    function with zeros (`relu`), of those above 0. It does not depend on how a batch is cut into micro
    batches. With `restricted`, f_bi is of the wanted pairs, as DeepSeek-V2 counts within its device limit.
    global_batch: f of the wanted pairs of all data-parallel ranks' micro batches together, and P of this one;
    the mean over ranks is E * sum_i f_i P_i of them all. With `running`, f of all pairs of the step so far,
    including earlier micro batches; Megatron-Core takes the mean of their f, which is the same for equal
    numbers of pairs. It depends on how a batch is cut. In evaluation f is of this rank's micro batch, because
    ranks may evaluate different numbers of batches.

    With `sum_of_f: k` the loss is k at perfect balance. docs/route/parts.md#weights-of-losses says which
    published weight needs it.

    Source: Fedus et al. 2021 (Switch) eq. 4-6; Yang et al. 2024 (XMoE) A.2; DeepSeek-V3 eq. 17-20 (sequence);
    Qiu et al. 2025 (global batch).
    """

    experts_alike = True

    @dataclass
    class Config:
        """weight: factor in the total loss. scope: see the class; DeepSeek-V3 uses `sequence` with weight
        1e-4. first_choice: count only each token's first choice. running: accumulate f of the global batch
        over the micro batches of a step. restricted: in the scope `sequence`, count the wanted pairs.
        probs: whether P takes every p_i, or only the p_i of tokens whose first choice is i. over_layers:
        the MoE layers' losses are added, or their mean is. sum_of_f: f sums to 1, or to k, the
        number of experts of a token, as in transformers.
        """

        weight: float = 0.01
        scope: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
        first_choice: bool = False
        running: bool = False
        restricted: bool = False
        probs: Literal["all", "first_choice"] = "all"
        over_layers: Literal["sum", "mean"] = "sum"
        sum_of_f: Literal[1, "k"] = 1

        def __post_init__(self) -> None:
            if self.running and self.scope != "global_batch":
                raise ValueError(f"running: true needs scope: global_batch, found {self.scope!r}")
            if self.restricted and self.scope != "sequence":
                raise ValueError(f"restricted: true needs scope: sequence, found {self.scope!r}")
            if self.first_choice and self.sum_of_f == "k":
                raise ValueError("sum_of_f: k needs first_choice: false: of first choices f sums to 1")
            if self.probs == "first_choice" and self.scope == "sequence":
                raise ValueError("probs: first_choice is not defined for scope: sequence; set probs: all")

    @classmethod
    def provides(cls, options: Config) -> set[str]:
        return {"over_all_ranks"} if options.scope == "global_batch" else set()

    @classmethod
    def requires(cls, options: Config) -> dict[str, str]:
        return {} if options.sum_of_f == 1 else {"fixed_count": "so that there is a k that f sums to"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        if options.scope != "sequence":
            refuse_even_selector(moe, options.first_choice)
            refuse_all_chosen(moe, options.first_choice)
        elif options.restricted:
            refuse_all_chosen(moe, options.first_choice, by_candidates=False)
        elif not options.first_choice:
            refuse_all_largest(moe)

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__(config, dims)
        self._step: int | None = None
        # For the current step: micro batch -> the counts up to and including it, for recomputation.
        self._so_far: dict[int, Tensor] = {}

    def forward(self, routing: Routing, context: StepContext) -> Tensor:
        """Return a scalar, fp32; 0 if there are no tokens."""
        loss = self._of_pairs(routing, context)
        return loss if self.config.sum_of_f == 1 else loss * self.dims.num_choices

    def _of_pairs(self, routing: Routing, context: StepContext) -> Tensor:
        if self.config.scope == "sequence":
            return self._over_sequences(routing, context)
        counts_E = wanted_counts(routing, self.config.first_choice)
        if self.config.scope == "global_batch" and self.training:
            counts_E = self._global_counts(counts_E, context)
        probs_TE = probs_shares(routing, self.dims.score_function)
        if self.config.probs == "all":
            return balance(probs_TE, counts_E, self.dims.kernels)
        probs_E = _first_choice_probs(routing, probs_TE)
        return routing.num_experts * (fractions(counts_E) * probs_E).sum() / max(routing.num_tokens, 1)

    def _over_sequences(self, routing: Routing, context: StepContext) -> Tensor:
        affinities_TE = routing.affinities_TE
        (num_tokens, num_experts), num_sequences = affinities_TE.shape, context.num_sequences
        sequence_T = context.sequence(num_tokens, affinities_TE.device)
        counted_N = None
        if self.config.restricted:
            token_N, expert_N = routing.wanted.token_N, routing.wanted.expert_N
            if self.config.first_choice:
                first = routing.wanted.choice_N == 0
                token_N, expert_N = token_N[first], expert_N[first]
            cell_N = sequence_T[token_N] * num_experts + expert_N
        else:
            k = 1 if self.config.first_choice else self.dims.num_choices
            expert_TK = largest(routing.within_tokens_TE(affinities_TE), k)
            cell_N = (sequence_T[:, None] * num_experts + expert_TK).reshape(-1)
            if "zeros" in self.dims.score_function:  # experts of s = 0 are no choice, whatever fills up k
                counted_N = affinities_TE.gather(1, expert_TK).reshape(-1) > 0
        counts_BE = count(cell_N, num_sequences * num_experts, counted_N).view(num_sequences, num_experts)
        mean_share_BE = mean_over_sequences(shares(affinities_TE), context)
        return num_experts * (fractions(counts_BE) * mean_share_BE).sum() / num_sequences

    def _global_counts(self, counts_E: Tensor, context: StepContext) -> Tensor:
        if self._step != context.step:
            self._step, self._so_far = context.step, {}
        if self.config.running and context.micro_batch in self._so_far:
            return self._so_far[context.micro_batch]
        if context.data_group is not None:
            counts_E = counts_E.clone()
            dist.all_reduce(counts_E, group=context.data_group)
        if self.config.running:
            if self._so_far:
                counts_E = counts_E + next(reversed(self._so_far.values()))
            self._so_far[context.micro_batch] = counts_E
        return counts_E


def _first_choice_probs(routing: Routing, probs_TE: Tensor) -> Tensor:
    """Return the sum of p_i over the tokens whose first choice is expert i, [E]."""
    first_N = routing.wanted.choice_N == 0
    token_N, expert_N = routing.wanted.token_N[first_N], routing.wanted.expert_N[first_N]
    prob_N = probs_TE[token_N, expert_N]
    return prob_N.new_zeros(routing.num_experts).index_add(0, expert_N, prob_N)
