"""What several scorers use: rows of experts, tables of token ids, the temperature of cosines; the counts of
tokens in the data, from a file.
"""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from megamoe.errors import UserError
from megamoe.io import open_plain
from megamoe.moe.part import Dims, Part, StepContext, mean_row_norm

WAY_OUT = "give the PREFIX.counts.npy that tools/prepare_data.py writes beside the data"


class RowScorer(Part):
    """A scorer with a row of `weight` [E, H] for each expert."""

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__(config, dims)
        self.weight = nn.Parameter(torch.empty(dims.num_experts, dims.hidden_size))
        dims.init_weight(self.weight, "router")

    def metrics(self) -> dict[str, Tensor]:
        """Return the mean L2 norm of the experts' rows of the weight."""
        return {"embedding_norm": mean_row_norm(self.weight)}


class TableScorer(Part):
    """A scorer that looks each token's experts up by its id, in the buffer table_KV, int64.

    name: in the configuration. Building one raises UserError if the model has no token ids.
    """

    name: ClassVar[str]
    table_KV: Tensor

    @classmethod
    def provides(cls, options: Any) -> set[str]:
        return {"table_TK"}

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__(config, dims)
        if torch.get_default_device().type == "meta":  # only the sizes are needed
            table_KV = torch.empty(dims.num_choices, dims.vocab_size or 0, dtype=torch.int64)
        else:
            table_KV = self.draw_KV(known_vocabulary(dims, self.name))
        self.register_buffer("table_KV", table_KV)

    def draw_KV(self, vocab_size: int) -> Tensor:
        """Return the table; UserError if a file does not fit the vocabulary."""
        raise NotImplementedError

    def table_TK(self, context: StepContext) -> Tensor:
        """Return each token's experts, int64; UserError if the context has no token ids."""
        return self.table_KV[:, known_ids_T(context, self.name, self.table_KV.device)].T.contiguous()


def known_vocabulary(dims: Dims, scorer: str) -> int:
    """Return the rows of the embedding; UserError where there is none."""
    if dims.vocab_size is None:
        what = f"scorer {scorer} needs token ids, but this layer knows no vocabulary"
        raise UserError(f"{what}; choose another scorer")
    return dims.vocab_size


def known_ids_T(context: StepContext, scorer: str, device: torch.device) -> Tensor:
    """Return the token ids, int64, on the device; UserError where there are none."""
    if context.token_ids_T is None:
        raise UserError(f"scorer {scorer} needs token ids, but the layers got none; choose another scorer")
    return context.token_ids_T.to(device)


def open_counts(path: str) -> np.ndarray:
    """Memory-map the counts of a file; raise ValueError if it does not hold counts."""
    return open_integers("counts", path, ["vocabulary"], WAY_OUT)


def open_integers(option: str, path: str, sizes: list[str], way_out: str) -> np.ndarray:
    """Memory-map an int64 array of a .npy file.

    option: which names the file. sizes: names of the array's dimensions.

    Raises:
        ValueError: if the file cannot be read, or holds anything else.
    """
    try:
        open_plain(Path(path)).close()  # NumPy would wait on a pipe
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or "no .npy of numbers"
        raise ValueError(f"{option} {path!r} cannot be read ({reason}); {way_out}") from None
    if not isinstance(found, np.ndarray) or found.dtype != np.int64 or found.ndim != len(sizes):
        raise ValueError(f"{option} {path!r} is not int64 [{', '.join(sizes)}]; {way_out}")
    return found


def read_counts(path: str, vocab_size: int) -> np.ndarray:
    """Return the counts, int64 [V]; the ids that only pad the vocabulary have 0."""
    try:
        counts_V = np.array(open_counts(path))
    except ValueError as error:
        raise UserError(f"moe.router.scorer: {error}") from None
    if len(counts_V) > vocab_size or (counts_V < 0).any():
        raise UserError(
            f"moe.router.scorer: counts {path!r} has {len(counts_V)} ids; expected at most the embedding's "
            f"{vocab_size} rows, and no count under 0; take the PREFIX.counts.npy of the run's own data"
        )
    return np.pad(counts_V, (0, vocab_size - len(counts_V)))


def default_temperature(score_function: frozenset[str]) -> float:
    """Return tau_0, the first temperature of cosines (Chi et al. 2022, X-MoE, appendix A).

    It is 0.07 for an elementwise score function (sigmoid), 0.3 for others (softmax). score_function: what it
    provides, see `Dims`.
    """
    return 0.07 if "elementwise" in score_function else 0.3
