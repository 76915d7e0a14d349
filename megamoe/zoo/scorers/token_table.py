"""`token_table`: a fixed table chooses the experts of each token id, and a learned scorer weights them."""

import heapq
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megamoe.config.schema import MoEConfig
from megamoe.errors import UserError
from megamoe.kernels.router import scores
from megamoe.moe import rng
from megamoe.moe.part import StepContext
from megamoe.moe.scorers.common import (
    WAY_OUT,
    RowScorer,
    TableScorer,
    open_counts,
    open_integers,
    read_counts,
)
from megamoe.registry import register

_CHUNK = 4096  # token ids whose draws are in memory at once


@register("scorer", "token_table")
class TokenTableScorer(RowScorer, TableScorer):
    """s = W x; the k experts of a token are those of its id in a table, which the selector `table` reads.

    The table, int64 [k, V], is a buffer: checkpoints save it. V is the number of the embedding's rows. The k
    experts of an id are distinct.

    round_robin: id v has the k experts from v k + shift on, modulo E, with a shift drawn from (seed, layer).
    hash: k experts drawn for each id from (seed, layer). frequency: ids in order of falling frequency, each
    to the k experts with the fewest tokens so far, with random ties. file: a .npy file of the table, int64 [V
    or fewer, k].

    Source: DeepSeek-V4, the hash layers at the bottom, as in its transformers module.

    Caveats: how DeepSeek-V4's table was made is not known to us; the four ways are ours.
    """

    name = "token_table"
    takes_any_dtype = True

    @dataclass
    class Config:
        """table: see the class. counts: for frequency, a .npy file, int64 [vocabulary], with the number of
        tokens of each id in the training data; tools/prepare_data.py writes it (PREFIX.counts.npy). path: of
        the table's file, for file.
        """

        table: Literal["round_robin", "hash", "frequency", "file"] = "hash"
        counts: str | None = None
        path: str | None = None

        def __post_init__(self) -> None:
            if (self.table == "frequency") != (self.counts is not None):
                raise ValueError(f"table: frequency and counts go together, found {self.table!r}; {WAY_OUT}")
            if (self.table == "file") != (self.path is not None):
                raise ValueError(
                    f"table: file and path go together, found {self.table!r}; path is a .npy file, int64 "
                    "[token ids, k]"
                )

    @classmethod
    def must_be_required(cls, options: Config) -> dict[tuple[str, str], str]:
        return {("selector", "table_TK"): "since otherwise the table chooses nothing"}

    @classmethod
    def check(cls, options: Config, moe: MoEConfig, expert_parallel: int) -> None:
        k = getattr(moe.router.selector.options, "k", 1)
        if k > moe.num_experts:
            raise ValueError(f"the selector's k is {k}, but there are only {moe.num_experts} experts")
        if options.counts is not None:
            open_counts(options.counts)
        if options.path is not None:
            _check_table(_open_table(options.path), options.path, k, moe.num_experts)

    def forward(self, hidden_TH: Tensor, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """[T, H] in any float dtype -> [T, E] fp32, and the extra `table_TK`, int64: each token's experts.

        Raises:
            UserError: if the context has no token ids.
        """
        return scores(hidden_TH, self.weight, self.dims.kernels), {"table_TK": self.table_TK(context)}

    def draw_KV(self, vocab_size: int) -> Tensor:
        """See `TableScorer`."""
        return self._table_VK(vocab_size).T.contiguous()

    def _table_VK(self, vocab_size: int) -> Tensor:
        num_experts, k = self.dims.num_experts, self.dims.num_choices
        if self.config.table == "file":
            return _read_table(self.config.path, vocab_size, k, num_experts)
        draw_key = rng.key(self.dims.seed, 0, self.dims.layer, "token table")
        if self.config.table == "round_robin":
            first_V = torch.arange(vocab_size, device="cpu") * k + draw_key % num_experts
            return (first_V[:, None] + torch.arange(k, device="cpu")) % num_experts
        if self.config.table == "frequency":
            word_V = torch.arange(vocab_size, device="cpu")
            tie_V = rng.uniform(draw_key, word_V, 1, kernels=self.dims.kernels)[:, 0]
            return _balanced_VK(read_counts(self.config.counts, vocab_size), num_experts, k, tie_V.numpy())
        found = []
        for word_C in torch.arange(vocab_size, device="cpu").split(_CHUNK):
            unit_CE = rng.uniform(draw_key, word_C, num_experts, kernels=self.dims.kernels)
            found.append(unit_CE.argsort(dim=1, stable=True)[:, :k])
        return torch.cat(found)


def _balanced_VK(counts_V: np.ndarray, num_experts: int, k: int, tie_V: np.ndarray) -> Tensor:
    """Return the greedy assignment, int64 [V, k]; ids that never occur are assigned round-robin."""
    order_V = np.lexsort((tie_V, -counts_V))
    num_seen = int(np.count_nonzero(counts_V))
    table_VK = np.empty((len(counts_V), k), dtype=np.int64)
    heap = [(0, expert) for expert in range(num_experts)]  # (tokens so far, expert)
    for token in order_V[:num_seen].tolist():
        least = [heapq.heappop(heap) for _ in range(k)]
        table_VK[token] = [expert for _, expert in least]
        for load, expert in least:
            heapq.heappush(heap, (load + int(counts_V[token]), expert))
    unseen = order_V[num_seen:]
    table_VK[unseen] = (np.arange(len(unseen))[:, None] * k + np.arange(k)) % num_experts
    return torch.from_numpy(table_VK)


def _open_table(path: str) -> np.ndarray:
    return open_integers("path", path, ["token ids", "k"], "give a .npy of such a table")


def _check_table(table_VK: np.ndarray, path: str, k: int, num_experts: int) -> None:
    """Raise ValueError unless each row has k distinct experts."""
    if table_VK.shape[1] != k:
        raise ValueError(
            f"path {path!r} has {table_VK.shape[1]} experts of each id, but the selector's k is {k}"
        )
    if len(table_VK) and (table_VK.min() < 0 or table_VK.max() >= num_experts):
        raise ValueError(f"path {path!r} names experts beyond 0 to {num_experts - 1} (moe.num_experts)")
    if (np.diff(np.sort(table_VK, axis=1), axis=1) == 0).any():
        raise ValueError(f"path {path!r} gives an id the same expert twice")


def _read_table(path: str, vocab_size: int, k: int, num_experts: int) -> Tensor:
    """Return the table, int64 [V, k]; ids beyond the file's, which only pad the vocabulary, round-robin."""
    try:
        table_VK = np.array(_open_table(path))
        _check_table(table_VK, path, k, num_experts)
    except ValueError as error:
        raise UserError(f"moe.router.scorer: token_table: {error}") from None
    if len(table_VK) > vocab_size:
        raise UserError(
            f"moe.router.scorer: token_table: path {path!r} has {len(table_VK)} ids; expected at most the "
            f"embedding's {vocab_size} rows"
        )
    padding_V = np.arange(len(table_VK), vocab_size)
    rest_VK = (padding_V[:, None] * k + np.arange(k)) % num_experts
    return torch.from_numpy(np.concatenate([table_VK, rest_VK]))
