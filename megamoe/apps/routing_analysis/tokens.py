"""Which tokens go to which expert, what an expert says about its token, and a map of tokens in two
dimensions.
"""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megamoe.apps.routing_analysis.collect import WINDOW, LayerPass, RoutingPass

POINTS = 2000  # more of them hide each other
NEIGHBOURS, MIN_DISTANCE = 100, 1.0  # as in the paper
Floats = NDArray[np.floating]


def token_map(layer: LayerPass) -> dict[str, Any]:
    """Place the first `POINTS` sampled tokens on a plane.

    The vectors are the router's input, or what its scorer makes of it where it compares tokens and experts in
    a space of its own. Returns method: `umap` if the package umap-learn is installed, otherwise `pca`.
    xy_S2: coordinates without a unit. first_S: the first expert of each, -1 for none. explained: for PCA, the
    two axes' shares of the variance.

    Source: Chi et al. 2022 (X-MoE), figures 2a and 2b: UMAP with 100 neighbours and a minimum distance of 1.
    """
    vectors = layer.hidden_SH if layer.projected_SD is None else layer.projected_SD
    vectors_SD, first_S = vectors[:POINTS].double().numpy(), layer.first_S[:POINTS]
    found: dict[str, Any] = {"first_S": first_S.tolist()}
    xy_S2 = umap_of(vectors_SD) if len(vectors_SD) > 3 else None
    if xy_S2 is not None:
        return {"method": "umap", "xy_S2": xy_S2.round(4).tolist(), **found}
    xy_S2, explained = pca(vectors_SD)
    return {"method": "pca", "explained": explained, "xy_S2": xy_S2.round(4).tolist(), **found}


def pca(vectors_SD: Floats) -> tuple[Floats, list[float]]:
    """Return the first two principal components [S, 2], and the shares of the variance that they have.

    The sign of an axis is such that its entry of the largest absolute value is positive.
    """
    if not len(vectors_SD):
        return np.zeros((0, 2)), [0.0, 0.0]
    centred = vectors_SD - vectors_SD.mean(0)
    left, scale, axes = np.linalg.svd(centred, full_matrices=False)
    axes_2D = axes[:2]
    sign = np.sign(axes_2D[np.arange(len(axes_2D)), np.abs(axes_2D).argmax(1)])
    total = max(float((scale**2).sum()), np.finfo(np.float64).tiny)
    xy_S2 = left[:, :2] * scale[:2] * sign
    missing = 2 - xy_S2.shape[1]  # one token or one dimension has one axis
    shares = [float(value**2) / total for value in scale[:2]] + [0.0] * missing
    return np.pad(xy_S2, ((0, 0), (0, missing))), shares


def umap_of(vectors_SD: Floats) -> Floats | None:
    """Return UMAP's two dimensions [S, 2], the same in every call; None if umap-learn cannot be imported."""
    try:
        umap = importlib.import_module("umap")
    except ImportError:
        return None
    neighbours = min(NEIGHBOURS, len(vectors_SD) - 1)
    reducer = umap.UMAP(
        n_neighbors=neighbours, min_dist=MIN_DISTANCE, n_components=2, random_state=0, n_jobs=1
    )
    return np.asarray(reducer.fit_transform(vectors_SD), dtype=np.float64)


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
