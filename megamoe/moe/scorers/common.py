"""What several scorers use: the temperature of cosines; the counts of tokens in the data, from a file."""

from pathlib import Path

import numpy as np

from megamoe.errors import UserError
from megamoe.io import open_plain

WAY_OUT = "give the PREFIX.counts.npy that tools/prepare_data.py writes beside the data"


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
