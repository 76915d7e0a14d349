"""What a pass collects, and the analyses that run the model, against plain computations on the same model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megamoe.apps.evaluation.perplexity import perplexity_on
from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.routing_analysis.collect import WINDOW, RoutingPass, TokenSample, chosen_layers, collect
from megamoe.apps.routing_analysis.measures import DRAWS, training_load
from megamoe.apps.routing_analysis.positives import positive_activations
from megamoe.apps.routing_analysis.study import Options, StudyData, check_shape, examine
from megamoe.errors import UserError
from megamoe.moe.routing import Routing
from tests.support.apps.tiny_model import SAMPLES, TOKENS, data_of, opened

pytestmark = pytest.mark.usefixtures("one_rank")
TOP_2 = "moe.router={scorer: linear, selector: {name: top_k, k: 2}}"
TIGHT = (
    "moe.router={scorer: linear, selector: {name: top_k, k: 2}, capacity: {name: per_expert, factor: 0.5}}"
)
EVEN = "moe.losses={}"


def passed(trained: TrainedModel, tokens: int = TOKENS, **options: Any) -> RoutingPass:
    sample = TokenSample.draw(TOKENS, tokens)
    layers = chosen_layers(trained, ())
    return collect(trained, data_of(trained), SAMPLES, sample=sample, layers=layers, **options)


def recorded(trained: TrainedModel, number: int) -> list[tuple[Tensor, Routing]]:
    """What the router of a layer reads and returns, by micro batch, while `passed` runs."""
    found: list[tuple[Tensor, Routing]] = []
    router = dict(trained.model.moe_layers())[number].router
    router.register_forward_hook(lambda _, inputs, routing: found.append((inputs[0].clone(), routing)))
    return found


def test_a_pass_keeps_the_sampled_tokens_and_counts_all() -> None:
    trained = opened(TIGHT)
    seen = recorded(trained, 2)
    found = passed(trained, tokens=20)
    layer, data = found.layers[2], data_of(trained)
    assert found.tokens == TOKENS and list(found.layers) == [1, 2]
    assert layer.load_E.sum() == sum(len(routing.pairs.token_N) for _, routing in seen) < 2 * TOKENS
    for place, index in enumerate(found.sample.index_S.tolist()):
        sequence, position = divmod(index, 8)
        # Two sequences a micro batch; tokens are ordered by position.
        hidden_TH, routing = seen[sequence // 2]
        row = position * 2 + sequence % 2
        assert torch.equal(layer.hidden_SH[place], hidden_TH[row])
        mine = routing.wanted.token_N == row
        assert layer.chosen_SE[place].nonzero().flatten().tolist() == sorted(
            routing.wanted.expert_N[mine].tolist()
        )
        assert layer.first_S[place] == routing.scores_TE[row].argmax()
        tokens = data[sequence]["tokens"].tolist()
        assert found.token_S[place] == tokens[position]
        padded = [-1] * WINDOW + tokens + [-1] * WINDOW
        assert found.window_SW[place].tolist() == padded[position : position + 2 * WINDOW + 1]


@pytest.mark.parametrize("kind", [[], ["model.architecture=encoder", "train.objective=masked"]], ids=len)
def test_the_loss_of_a_pass_is_that_of_an_evaluation(kind: list[str]) -> None:
    trained = opened(TOP_2, *kind)
    assert passed(trained).lm_loss == perplexity_on(trained, data_of(trained), SAMPLES).lm_loss


def test_the_required_experts_of_a_threshold_router_are_those_it_chooses() -> None:
    trained = opened("moe.router={scorer: linear, selector: {name: threshold, threshold: 0.7}}")
    found = passed(trained, thresholds=(0.7, 1.0))
    for layer in found.layers.values():
        needed_E = layer.required_CE[0] * torch.arange(1, 5)
        assert needed_E.sum() == layer.chosen_SE.sum()
        assert torch.equal(layer.required_CE[0], torch.bincount(layer.chosen_SE.sum(1) - 1, minlength=4))
        assert layer.required_CE[1].tolist() == [0, 0, 0, TOKENS]


def test_the_projection_is_the_scorers() -> None:
    trained = opened("moe.router={scorer: {name: cosine, routing_dim: 3}, selector: {name: top_k, k: 2}}")
    layer = passed(trained).layers[1]
    weight = dict(trained.model.moe_layers())[1].router.scorer.weight
    assert isinstance(weight, Tensor) and layer.projected_SD is not None
    assert torch.allclose(layer.projected_SD, layer.hidden_SH @ weight.detach().T, atol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "gelu", "reglu", "geglu"])
def test_positive_activations_are_those_of_the_chosen_experts(activation: str) -> None:
    trained = opened(
        TOP_2, f"moe.expert_activation={activation}", "moe.layers={at: [2]}", "model.activation=gelu"
    )
    layers = chosen_layers(trained, ())
    inputs: list[Tensor] = []
    mlp: Any = trained.decoder.model.decoder.layers[0].mlp
    mlp.register_forward_pre_hook(lambda _, given: inputs.append(given[0].detach()))
    layer = passed(trained).layers[2]
    experts: Any = layers[2].experts
    up_EFH = experts.up.detach()
    values = torch.cat([layer.hidden_SH[row] @ up_EFH[e].T[None] for row, e in layer.chosen_SE.nonzero()])
    gate = values[:, : values.shape[1] // 2] if activation.endswith("glu") else values
    active = functional.relu(gate) if activation in ("relu", "reglu") else functional.gelu(gate)
    found = positive_activations(trained, data_of(trained), SAMPLES, layers)
    assert found["experts"] == {"2": pytest.approx(float((active > 0).double().mean()))}
    first = functional.gelu(torch.cat(inputs[: SAMPLES // 2], 1) @ mlp.linear_fc1.weight.detach().T)
    assert found["dense"] == {"1": pytest.approx(float((first > 0).double().mean()))}


def test_positive_activations_of_stacks_count_every_sublayer() -> None:
    trained = opened(TOP_2, "moe.expert_activation=relu", "moe.expert_sublayers=2", EVEN)
    layers = chosen_layers(trained, ())
    with torch.no_grad():  # of the second sub-layer nothing is positive
        for layer in layers.values():
            experts: Any = layer.experts
            experts.sublayers[1].up.zero_()
    found = positive_activations(trained, data_of(trained), SAMPLES, layers)["experts"]
    assert all(share is not None and 0.1 < share < 0.4 for share in found.values())


def test_positive_activations_of_an_encoder() -> None:
    kind = ["model.architecture=encoder", "train.objective=masked", "model.activation=gelu"]
    trained = opened(TOP_2, "moe.expert_activation=gelu", "moe.layers={at: [2]}", *kind)
    found = positive_activations(trained, data_of(trained), SAMPLES, chosen_layers(trained, ()))
    assert found["dense"].keys() == {"1"} and found["experts"].keys() == {"2"}
    assert all(share is not None and 0 < share < 1 for by in found.values() for share in by.values())


@pytest.mark.parametrize(
    "other",
    [
        "moe.router.capacity={name: per_expert, factor: 4.0, pad: true}",  # whose empty places are rows of 0
        "moe.losses={expert_router_coupling: 1.0}",  # which probes the experts with rows of its own
    ],
)
def test_positive_activations_count_the_rows_of_pairs_alone(other: str) -> None:
    found = []
    rows = "moe.router.scorer={name: linear, rows: true}"  # for the loss; the router is the same
    for more in ([], [other]):
        trained = opened(TOP_2, rows, "moe.expert_activation=gelu", EVEN, *more)
        layers = chosen_layers(trained, ())
        found.append(positive_activations(trained, data_of(trained), SAMPLES, layers)["experts"])
    assert found[1] == pytest.approx(found[0])


def test_loads_in_training_mode_are_those_of_the_next_steps() -> None:
    calm, noisy = opened(TOP_2), opened(TOP_2.replace("linear", "{name: linear, jitter: 0.9}"))
    layers = chosen_layers(calm, ())
    same = training_load(calm, data_of(calm), SAMPLES, layers)
    inference = passed(calm).layers
    for number in layers:
        assert same[number].tolist() == (DRAWS * inference[number].load_E).tolist()
    first = training_load(noisy, data_of(noisy), SAMPLES, chosen_layers(noisy, ()))
    again = training_load(noisy, data_of(noisy), SAMPLES, chosen_layers(noisy, ()))
    assert first[1].tolist() == again[1].tolist() != (DRAWS * passed(noisy).layers[1].load_E).tolist()
    assert noisy.context.step == 5 and not any(module.training for module in noisy.model.modules())


def test_layers_that_are_not_there_are_a_line() -> None:
    trained = opened("moe.layers={at: [2]}")
    with pytest.raises(UserError, match="layer 1 is no MoE layer; it has 2"):
        chosen_layers(trained, (2, 1))
    with pytest.raises(UserError, match="the model is dense; expected one with MoE layers"):
        chosen_layers(opened("moe.layers={at: [], every: null}"), ())
    with pytest.raises(UserError, match=f"^{Path('runs/tiny')}.* these have swiglu"):
        positive_activations(opened(), data_of(trained), SAMPLES, {})


def test_checkpoints_that_do_not_fit_each_other_are_a_line() -> None:
    first = opened(TOP_2)
    data = StudyData.of(first, Options(samples=SAMPLES))
    data.check(opened("seed=3"), first.path)
    with pytest.raises(UserError, match="data.sequence_length 16, .* has 8; add the override"):
        data.check(opened("data.sequence_length=16"), first.path)
    found = examine(first, data, Options(analyses=("collapse",)))
    check_shape(opened(), found, Options())
    with pytest.raises(UserError, match=r"are {1: 2, 2: 2}, those of .* {1: 4, 2: 4}; compare"):
        check_shape(opened("moe.num_experts=2"), found, Options())
    with_others = opened(TOP_2, "moe.zero_experts={identity: 2}", EVEN)
    found = examine(with_others, data, Options(analyses=("collapse",)))
    check_shape(with_others, found, Options())
