"""`hash`: a fixed random table maps token ids to experts; nothing is learned."""

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.moe import rng
from megamoe.moe.part import StepContext
from megamoe.moe.scorers.common import WAY_OUT, TableScorer, open_counts, read_counts
from megamoe.registry import register


@register("scorer", "hash")
class HashScorer(TableScorer):
    """K tables token id -> expert, drawn once from (seed, layer); the selector `table` reads them.

    The table, int64 [K, V], is saved in checkpoints; V is the number of the embedding's rows. The scores are
    1 for a token's experts in the tables and 0 elsewhere. They carry no gradient, so a loss on them has no
    effect.

    random: each id has an expert drawn independently. frequency: ids in order of falling frequency, each to
    the expert with the fewest tokens so far, with random ties; ids that never occur are assigned round-robin.

    Source: Roller et al. 2021 (Hash Layers), section 3, random hash and balanced assignment; a baseline of
    Yang et al. 2024 (XMoE).

    Caveats. The paper's MultiHash cuts each expert into segments; here, K > 1 sums K whole experts. Greedy
    tables from the same counts would put the same frequent ids together, and K of them would act as one wider
    expert. So from the second table on, the ids are permuted among E neighbours in the order of frequency.
    """

    name = "hash"

    @dataclass
    class Config:
        """balance: see the class. counts: for frequency, a .npy file, int64 [vocabulary], with the number of
        tokens of each id in the training data; tools/prepare_data.py writes it (PREFIX.counts.npy).
        """

        balance: Literal["random", "frequency"] = "random"
        counts: str | None = None

        def __post_init__(self) -> None:
            if self.balance == "frequency" and self.counts is None:
                raise ValueError(f"balance: frequency needs counts; {WAY_OUT}")
            if self.balance == "random" and self.counts is not None:
                raise ValueError(
                    "counts are for balance: frequency only, found balance: random; leave them out"
                )

    @classmethod
    def must_be_required(cls, options: Config) -> dict[tuple[str, str], str]:
        return {("selector", "table_TK"): "since the scores say no more than the tables"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        if options.counts is not None:
            open_counts(options.counts)
        for name in (name for name, choice in moe.losses.items() if choice.options.weight > 0):
            raise ValueError(f"moe.losses.{name} has no score to teach; leave it out, or log it by weight: 0")

    def forward(self, hidden_TH: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """[T, H] -> [T, E] fp32, and the extra `table_TK`, int64: each token's expert in each table.

        Raises:
            UserError: if the context has no token ids.
        """
        table_TK = self.table_TK(context)
        scores_TE = hidden_TH.new_zeros(len(table_TK), self.dims.num_experts).scatter_(1, table_TK, 1.0)
        return scores_TE, {"table_TK": table_TK}

    def draw_KV(self, vocab_size: int) -> Tensor:
        num_tables, num_experts = self.dims.num_choices, self.dims.num_experts
        draw_key = rng.key(self.dims.seed, 0, self.dims.layer, "hash")
        word_V = torch.arange(vocab_size, device="cpu")
        uniform_VK = rng.uniform(draw_key, word_V, num_tables, kernels=self.dims.kernels)
        if self.config.balance == "random":
            return (uniform_VK.T * num_experts).long()  # uniform < 1, so this is below E even when rounded
        counts_V = read_counts(self.config.counts, vocab_size)
        tables = [
            _balanced_V(counts_V, num_experts, tie_V.numpy(), exact=number == 0)
            for number, tie_V in enumerate(uniform_VK.T)
        ]
        return torch.stack(tables)


def _balanced_V(counts_V: np.ndarray, num_experts: int, tie_V: np.ndarray, exact: bool) -> Tensor:
    """Return the greedy assignment, int64 [V]; not `exact`: ids of similar rank are ordered by `tie_V`."""
    order_V = np.lexsort((tie_V, -counts_V))
    num_seen = int(np.count_nonzero(counts_V))
    order_S, unseen = order_V[:num_seen], order_V[num_seen:]
    if not exact:
        order_S = order_S[np.lexsort((tie_V[order_S], np.arange(num_seen) // num_experts))]
    table_V = np.empty(len(counts_V), dtype=np.int64)
    heap = [(0, expert) for expert in range(num_experts)]  # (tokens so far, expert)
    for word, count in zip(order_S.tolist(), counts_V[order_S].tolist(), strict=True):
        load, table_V[word] = heap[0]
        heapq.heapreplace(heap, (load + count, int(table_V[word])))
    table_V[unseen] = np.arange(len(unseen)) % num_experts
    return torch.from_numpy(table_V)
