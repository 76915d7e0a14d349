"""The measures of a study of routing: loads, experts chosen together, how many a token needs, consistency
between runs and checkpoints, collapse, and which tokens go to which expert.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.routing_analysis.collect import WINDOW, LayerPass, RoutingPass, TokenSample, collect
from megamoe.moe.layer import MoELayer

DRAWS = 4  # passes in training mode, each with the random draws of another step
POINTS = 2000  # more of them hide each other
Floats = NDArray[np.floating]


def training_load(
    trained: TrainedModel, dataset: Any, samples: int, layers: dict[int, MoELayer]
) -> dict[int, NDArray[np.int64]]:
    """Return the pairs that each expert computes with its layer in training mode, int64 [E] by layer.

    These are sums over `DRAWS` passes, with the random draws (noise, jitter, expert dropout) of the steps
    that would follow. The MoE layers are in training mode, with their capacity for training; the rest of the
    model has no dropout, so the tokens of the first MoE layer are those of inference. Collective.
    """
    sums: dict[int, NDArray[np.int64]] = {}
    nothing, first_step = TokenSample.draw(0, 0), trained.context.step
    modules = nn.ModuleList(layer for _, layer in trained.model.moe_layers())
    try:
        modules.train()
        for draw in range(DRAWS):
            trained.context.step = first_step + draw
            found = collect(trained, dataset, samples, sample=nothing, layers=layers)
            for number, layer in found.layers.items():
                sums[number] = sums.get(number, 0) + layer.load_E.numpy()
    finally:
        modules.eval()
        trained.context.step = first_step
    return sums


def compare_loads(inference: RoutingPass, training: dict[int, NDArray[np.int64]]) -> dict[str, Any]:
    """Return by layer the share f_i of the pairs that expert i computes in each mode, and their distance.

    inference, training: f_E. distance: half the sum of |difference|, between 0 and 1. inference_max_over_mean
    and training_max_over_mean: the largest share over the mean share.

    Source: Xie et al. 2022 (MoEC), figure 5, which shows f of one cluster in both modes; f_i is that of their
    balance loss (eq. 3). The distance is ours (total variation).
    """
    found = {}
    for number, layer in inference.layers.items():
        calm_E, noisy_E = shares(layer.load_E.numpy()), shares(training[number])
        found[str(number)] = {
            "inference": calm_E.tolist(),
            "training": noisy_E.tolist(),
            "distance": float(np.abs(calm_E - noisy_E).sum() / 2),
            "inference_max_over_mean": float(calm_E.max() * len(calm_E)),
            "training_max_over_mean": float(noisy_E.max() * len(noisy_E)),
        }
    return found


def shares(load_E: ArrayLike) -> NDArray[np.float64]:
    """Return each expert's share of the pairs; 0 for all where there is no pair."""
    load = np.asarray(load_E, dtype=np.float64)
    return load / max(load.sum(), 1.0)


def required(layer: LayerPass, thresholds: tuple[float, ...]) -> dict[str, Any]:
    """Return for each threshold the number m of experts that tokens need, over all tokens of the pass.

    m is the smallest number with p_1 + ... + p_m >= t (p_1 + ... + p_E), p sorted from the largest. Returns
    by threshold: mean, and tokens_M, the number of tokens with m = 1, 2, ..., E.

    Source: Yang et al. 2024 (XMoE), figure 5; eq. 5 and algorithm 1 for m.
    """
    found = {}
    for threshold, row_E in zip(thresholds, layer.required_CE.numpy(), strict=True):
        number_E = np.arange(1, len(row_E) + 1)
        mean = float((row_E * number_E).sum() / max(row_E.sum(), 1))
        found[f"{threshold:g}"] = {"mean": mean, "tokens_M": row_E.tolist()}
    return found


def fluctuation(earlier: LayerPass, later: LayerPass) -> dict[str, float]:
    """Compare the choices of two checkpoints for the same sampled tokens.

    Returns:
        first: the share of tokens whose first choice differs: the RF ratio. chosen: the mean over tokens of
        1 - |A and B| / |A or B| for the sets A and B of all chosen experts; equal to `first` where each token
        has one expert.

    Source: Chi et al. 2022 (X-MoE), section 4.5 and figure 3a, where each token has one expert; `chosen` is
    ours, for several.
    """
    return {
        "first": changed_first(earlier.first_S.numpy(), later.first_S.numpy()),
        "chosen": changed_sets(earlier.chosen_SE.numpy(), later.chosen_SE.numpy()),
    }


def changed_first(earlier_S: NDArray[np.int64], later_S: NDArray[np.int64]) -> float:
    """Return the share of tokens whose expert differs; -1, no expert, counts like an expert."""
    return float((earlier_S != later_S).mean()) if len(earlier_S) else 0.0


def changed_sets(earlier_SE: NDArray[np.bool_], later_SE: NDArray[np.bool_]) -> float:
    """Return the mean Jaccard distance of the tokens' sets of experts; two empty sets have distance 0."""
    both_S = (earlier_SE & later_SE).sum(1)
    any_S = (earlier_SE | later_SE).sum(1)
    same_S = np.where(any_S > 0, both_S / np.maximum(any_S, 1), 1.0)
    return float(1 - same_S.mean()) if len(same_S) else 0.0


SMALLEST = 1e-12  # an eigenvalue of the between-class covariance below this share of the largest counts as 0


def representation_collapse(hidden_SH: NDArray[np.floating], first_S: NDArray[np.int64]) -> float | None:
    """Return RC = Tr(W B+), with the covariances W within and B between classes; B+ is the pseudo inverse.

    A token's class is the expert that it chose first. With n_k tokens, mean m_k and class k of N tokens in
    all, and the mean m of all: W = 1/N sum_k sum_(i in k) (h_i - m_k)(h_i - m_k)^T and
    B = sum_k n_k/N (m_k - m)(m_k - m)^T. A smaller RC means more collapse.

    hidden_SH: the router's input [S, H]. first_S: int64 [S], -1 for a token without an expert, which is left
    out. None: fewer than two classes, or all of them have one mean.

    Source: Chi et al. 2022 (X-MoE), eq. 11, after Zhu et al. 2021, whose classes have equal sizes and who
    divide by the number of classes as well. Where sizes differ, the papers do not say how B weights the
    classes. Here each counts with its share of the tokens, so that W + B is the covariance of all tokens.
    """
    has_S = first_S >= 0
    hidden, expert = hidden_SH[has_S].astype(np.float64), first_S[has_S]
    classes, class_S, size_K = np.unique(expert, return_inverse=True, return_counts=True)
    if len(classes) < 2:
        return None
    mean_KH: Floats = np.zeros((len(classes), hidden.shape[1]))
    np.add.at(mean_KH, class_S, hidden)
    mean_KH /= size_K[:, None]
    between_KH = (mean_KH - hidden.mean(0)) * np.sqrt(size_K / len(hidden))[:, None]
    # B = between^T between has the eigenvectors `axes` and the eigenvalues `scale` squared.
    _, scale, axes = np.linalg.svd(between_KH, full_matrices=False)
    real = scale**2 > SMALLEST * max(scale[0] ** 2, np.finfo(np.float64).tiny)
    if not real.any():
        return None
    along = (hidden - mean_KH[class_S]) @ axes[real].T
    return float(((along**2).mean(0) / scale[real] ** 2).sum())


def token_map(layer: LayerPass) -> dict[str, Any]:
    """Place the first `POINTS` sampled tokens on a plane.

    The vectors are the router's input, or what its scorer makes of it where it compares tokens and experts in
    a space of its own. Returns xy_S2: their first two principal components, without a unit. explained: the
    two axes' shares of the variance. first_S: the first expert of each, -1 for none.

    Source: after Chi et al. 2022 (X-MoE), figures 2a and 2b, which are by UMAP.
    """
    vectors = layer.hidden_SH if layer.projected_SD is None else layer.projected_SD
    vectors_SD, first_S = vectors[:POINTS].double().numpy(), layer.first_S[:POINTS]
    xy_S2, explained = pca(vectors_SD)
    return {"explained": explained, "xy_S2": xy_S2.round(4).tolist(), "first_S": first_S.tolist()}


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
