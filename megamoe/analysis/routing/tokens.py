"""Which tokens go to which expert, and how much an expert says about its token's identity."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamoe.analysis.routing.collect import WINDOW, LayerPass, RoutingPass

TOP_TOKENS, EXAMPLES = 8, 3
Ints = NDArray[np.int64]
Decode = Callable[[list[int]], str]


def token_specialisation(found: RoutingPass, layer: LayerPass, decode: Decode | None) -> dict[str, Any]:
    """Describe a layer's experts by the sampled tokens that chose them.

    Returns:
        mutual_information: I(expert; token id) in bits over the chosen (token, expert) pairs. expert_entropy:
        H(expert) in bits, its upper bound. share: the first over the second. chance: the mutual information
        after the token ids were shuffled, which is what so few pairs show of independent variables. experts:
        by expert, `token_table`'s rows.

    Source: ours. The mutual information is the plug-in estimate, which is too high for few observations;
    hence `chance`. Tables of the tokens of an expert are in Zoph et al. 2022 (ST-MoE).
    """
    row_N, expert_N = np.nonzero(layer.chosen_SE.numpy())
    token_S = found.token_S.numpy()
    token_N = token_S[row_N]
    shuffled_N = np.random.default_rng(0).permutation(token_N)
    entropy = entropy_bits(np.unique(expert_N, return_counts=True)[1])
    information = mutual_information(token_N, expert_N)
    return {
        "mutual_information": information,
        "expert_entropy": entropy,
        "share": information / entropy if entropy else 0.0,
        "chance": mutual_information(shuffled_N, expert_N),
        "experts": [
            token_table(found.window_SW.numpy(), chosen_S, decode) for chosen_S in layer.chosen_SE.numpy().T
        ],
    }


def entropy_bits(count_X: NDArray[np.integer]) -> float:
    """Return the entropy in bits of a distribution that is given by counts."""
    share_X = count_X[count_X > 0] / max(count_X.sum(), 1)
    return max(float(-(share_X * np.log2(share_X)).sum()), 0.0)


def mutual_information(first_N: Ints, second_N: Ints) -> float:
    """Return I(A; B) = H(A) + H(B) - H(A, B) in bits, for N observations of two discrete variables."""
    if not len(first_N):
        return 0.0
    counts = [np.unique(values, return_counts=True)[1] for values in (first_N, second_N)]
    joint = np.unique(np.stack([first_N, second_N]), axis=1, return_counts=True)[1]
    return max(entropy_bits(counts[0]) + entropy_bits(counts[1]) - entropy_bits(joint), 0.0)


def token_table(
    window_SW: Ints, chosen_S: NDArray[np.bool_], decode: Decode | None = None
) -> list[dict[str, Any]]:
    """Return the most frequent tokens of one expert, at most `TOP_TOKENS`; of equals, the smaller id first.

    A row: token: the id. text: its text, None without a tokenizer. count: how many sampled tokens of this id
    chose the expert. of_token: their share of all sampled tokens of this id. examples: for up to `EXAMPLES`
    of them the text around, or without a tokenizer the ids.
    """
    token_S = window_SW[:, WINDOW]
    ids_I, count_I = np.unique(token_S[chosen_S], return_counts=True)
    rows = []
    for place in np.lexsort((ids_I, -count_I))[:TOP_TOKENS]:
        token, is_here_S = int(ids_I[place]), token_S == ids_I[place]
        windows = window_SW[chosen_S & is_here_S][:EXAMPLES]
        texts = [[int(word) for word in window if word >= 0] for window in windows]
        rows.append(
            {
                "token": token,
                "text": None if decode is None else decode([token]),
                "count": int(count_I[place]),
                "of_token": float(count_I[place] / is_here_S.sum()),
                "examples": texts if decode is None else [decode(text) for text in texts],
            }
        )
    return rows
