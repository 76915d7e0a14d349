"""Each measure of routing against a case worked by hand, or against NumPy and SciPy."""

import numpy as np
import pytest
import torch
from scipy.special import entr, rel_entr

from megamoe.apps.routing_analysis.collect import (
    WINDOW,
    LayerPass,
    RoutingPass,
    TokenSample,
    required_experts,
)
from megamoe.apps.routing_analysis.measures import (
    changed_first,
    changed_sets,
    compare_loads,
    fluctuation,
    mutual_information,
    pca,
    representation_collapse,
    required,
    shares,
    token_map,
    token_specialisation,
    token_table,
)

RANDOM = np.random.default_rng(17)


def layer_pass(chosen: list[list[int]], experts: int = 4) -> LayerPass:
    """A pass of one layer, in which sampled token s chose these experts, best first."""
    chosen_SE = torch.zeros(len(chosen), experts, dtype=torch.bool)
    for token, those in enumerate(chosen):
        chosen_SE[token, those] = True
    return LayerPass(
        load_E=chosen_SE.sum(0),
        required_CE=torch.tensor([[3, 1, 0, 0]]),
        hidden_SH=torch.arange(2.0 * len(chosen)).view(-1, 2),
        projected_SD=None,
        chosen_SE=chosen_SE,
        first_S=torch.tensor([those[0] if those else -1 for those in chosen]),
    )


def one_layer(layer: LayerPass, tokens: list[int]) -> RoutingPass:
    window_SW = torch.full((len(tokens), 2 * WINDOW + 1), -1)
    window_SW[:, WINDOW] = torch.tensor(tokens)
    return RoutingPass(TokenSample.draw(8, 8), len(tokens), 1.0, (0.9,), {2: layer}, window_SW)


def test_collapse_by_hand() -> None:
    # Two classes on a line, means 0 and 4, every point 1 from its mean: W = 1, B = 4.
    hidden = np.array([[-1.0], [1.0], [3.0], [5.0]])
    assert representation_collapse(hidden, np.array([0, 0, 7, 7])) == pytest.approx(1 / 4)
    # Variance across the line between the means does not count: B+ is 0 there.
    across = np.concatenate([hidden, [[9.0], [-9.0], [9.0], [-9.0]]], axis=1)
    assert representation_collapse(across, np.array([0, 0, 7, 7])) == pytest.approx(1 / 4)
    # One of three: sizes 2 and 1, means 0 and 3, so m = 1, B = (2 * 1 + 4) / 3 = 2, W = (1 + 1) / 3.
    assert representation_collapse(np.array([[-1.0], [1.0], [3.0]]), np.array([1, 1, 0])) == pytest.approx(
        1 / 3
    )


def test_collapse_is_the_trace_with_the_pseudo_inverse() -> None:
    hidden_SH, first_S = RANDOM.normal(size=(200, 12)).astype(np.float32), RANDOM.integers(-1, 5, 200)
    kept, expert = hidden_SH[first_S >= 0].astype(np.float64), first_S[first_S >= 0]
    within, between = np.zeros((12, 12)), np.zeros((12, 12))
    for k in range(5):
        mean = kept[expert == k].mean(0)
        within += (kept[expert == k] - mean).T @ (kept[expert == k] - mean) / len(kept)
        apart = mean - kept.mean(0)
        between += (expert == k).mean() * np.outer(apart, apart)
    assert np.allclose(within + between, np.cov(kept.T, bias=True))
    expected = np.trace(within @ np.linalg.pinv(between, rcond=1e-10, hermitian=True))
    assert representation_collapse(hidden_SH, first_S) == pytest.approx(expected, rel=1e-9)


def test_collapse_needs_two_classes_apart() -> None:
    assert representation_collapse(np.ones((3, 2)), np.array([1, 1, 1])) is None
    assert representation_collapse(np.ones((3, 2)), np.array([-1, -1, -1])) is None
    assert representation_collapse(np.ones((4, 2)), np.array([0, 0, 1, 1])) is None


def test_fluctuation_by_hand() -> None:
    earlier, later = layer_pass([[0, 1], [2, 3], [1, 0], []]), layer_pass([[0, 2], [3, 2], [1, 0], []])
    # First choices: only the second token's. Sets: {0,1}/{0,2} share 1 of 3, the others all.
    assert fluctuation(earlier, later) == {"first": 0.25, "chosen": pytest.approx((2 / 3) / 4)}
    assert changed_first(np.array([0, 1]), np.array([0, -1])) == 0.5
    one_hot = np.eye(4, dtype=bool)
    before, after = RANDOM.integers(0, 4, 100), RANDOM.integers(0, 4, 100)
    assert changed_sets(one_hot[before], one_hot[after]) == pytest.approx(changed_first(before, after))


def test_required_experts_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.0, 0.0, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    assert required_experts(probs, 0.75).tolist() == [2, 1, 3]
    assert required_experts(probs, 0.0).tolist() == [1, 1, 1]
    assert required_experts(probs, 1.0).tolist() == [4, 1, 4]
    # A share of the sum, which is 2 here.
    assert required_experts(torch.tensor([[1.0, 0.5, 0.5]]), 0.5).tolist() == [1]
    # Three tokens need 1 expert, one needs 2.
    found = required(layer_pass([]), (0.9,))
    assert found == {"0.9": {"mean": 1.25, "tokens_M": [3, 1, 0, 0]}}


def entropy_of(*counts: int) -> float:
    """Return the entropy in bits of shares in the proportion of the counts."""
    shares = np.array(counts) / sum(counts)
    return float(entr(shares).sum() / np.log(2))


def test_mutual_information_by_hand_and_by_scipy() -> None:
    assert mutual_information(np.array([5, 5, 9, 9]), np.array([0, 0, 1, 1])) == pytest.approx(1.0)
    assert mutual_information(np.array([5, 5, 9, 9]), np.array([0, 1, 0, 1])) == pytest.approx(0.0)
    tokens, experts = RANDOM.integers(0, 20, 500), RANDOM.integers(0, 6, 500)
    joint = np.zeros((20, 6))
    np.add.at(joint, (tokens, experts), 1 / 500)
    independent = np.outer(joint.sum(1), joint.sum(0))
    expected = rel_entr(joint, independent).sum() / np.log(2)
    assert mutual_information(tokens, experts) == pytest.approx(expected)
    assert mutual_information(tokens[:0], experts[:0]) == 0


def test_the_tables_of_tokens_by_hand() -> None:
    layer = layer_pass([[0], [0], [0], [1], [1], [2]])
    found = one_layer(layer, [7, 7, 3, 7, 4, 4])
    table = token_table(found.window_SW.numpy(), layer.chosen_SE.numpy()[:, 0], lambda ids: f"<{ids}>")
    assert table == [
        {"token": 7, "text": "<[7]>", "count": 2, "of_token": 2 / 3, "examples": ["<[7]>", "<[7]>"]},
        {"token": 3, "text": "<[3]>", "count": 1, "of_token": 1.0, "examples": ["<[3]>"]},
    ]
    described = token_specialisation(found, layer, None)
    assert described["experts"][3] == [] and described["experts"][2][0]["examples"] == [[4]]
    assert described["expert_entropy"] == pytest.approx(entropy_of(3, 2, 1))
    # H(expert) - H(expert | token): 7 has experts 0, 0, 1, and 4 has 1, 2.
    left = (3 * entropy_of(2, 1) + 2 * 1.0) / 6
    assert described["mutual_information"] == pytest.approx(described["expert_entropy"] - left)
    assert described["share"] == pytest.approx(described["mutual_information"] / described["expert_entropy"])


def test_loads_by_hand() -> None:
    layer = layer_pass([[0], [0], [0], [1]])
    found = compare_loads(one_layer(layer, [0] * 4), {2: np.array([2, 2, 4, 0])})["2"]
    assert found["inference"] == [0.75, 0.25, 0, 0] and found["training"] == [0.25, 0.25, 0.5, 0]
    assert found["distance"] == 0.5
    assert (found["inference_max_over_mean"], found["training_max_over_mean"]) == (3.0, 2.0)
    assert shares([0, 0]).tolist() == [0, 0]


def test_principal_components_are_the_eigenvectors_of_the_covariance() -> None:
    vectors = RANDOM.normal(size=(50, 6)) * [5, 3, 1, 1, 1, 1]
    values, axes = np.linalg.eigh(np.cov(vectors.T, bias=True))
    found, explained = pca(vectors)
    expected = (vectors - vectors.mean(0)) @ axes[:, ::-1][:, :2]
    for column in range(2):
        side = expected[:, column]
        assert np.allclose(found[:, column], side) or np.allclose(found[:, column], -side)
    assert np.allclose(explained, values[::-1][:2] / values.sum())
    assert pca(np.ones((1, 3)))[0].tolist() == [[0, 0]]
    assert np.allclose(pca(np.array([[1.0], [3.0]]))[0], [[-1, 0], [1, 0]])


def test_the_map_is_of_the_scorers_space() -> None:
    layer = layer_pass([[0], [1], [2], [], [3]])
    found = token_map(layer)
    assert found["first_S"] == [0, 1, 2, -1, 3]
    assert np.allclose(found["xy_S2"], pca(layer.hidden_SH.numpy())[0], atol=1e-4)
    layer.projected_SD = layer.hidden_SH[:, :1] ** 2
    assert np.allclose(token_map(layer)["xy_S2"], pca(layer.projected_SD.numpy())[0], atol=1e-4)


def test_a_sample_of_tokens_does_not_depend_on_who_has_them() -> None:
    sample = TokenSample.draw(1000, 100)
    assert len(set(sample.index_S.tolist())) == 100 and sample.index_S.diff().min() > 0
    assert torch.equal(sample.index_S, TokenSample.draw(1000, 100).index_S)
    mixed = torch.tensor(RANDOM.permutation(1000))
    parts = [sample.find(part) for part in mixed.split(300)]
    places = torch.cat([place_M for place_M, _ in parts])
    assert sorted(places.tolist()) == list(range(100))
    for part, (place_M, row_M) in zip(mixed.split(300), parts, strict=True):
        assert torch.equal(sample.index_S[place_M], part[row_M])
    assert len(TokenSample.draw(5, 100)) == 5
    assert not len(TokenSample.draw(0, 0).find(mixed)[0])
