"""The model: its size, its loss, who sees whom, how it starts."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from megamoe import registry
from megamoe.config.schema import Activation
from megamoe.config.shapes import moe_layer_numbers, padded_vocab_size
from megamoe.data.batches import document_items
from megamoe.kernels.attention.documents import Documents
from megamoe.kernels.library import find_library
from megamoe.model.size import model_size
from megamoe.moe.part import Dims, Part
from megamoe.moe.router import mean_choices
from megamoe.parallel.placements import shardings
from tests.support.moe.plain import plain_activation
from tests.support.tiny import VOCABULARY, tiny, tiny_gpt, tiny_model

S = 8
POSITIONS = torch.arange(S)[None]


def text(rows: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens and labels, [rows, S] each."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, VOCABULARY, (rows, S + 1), generator=generator)
    return words[:, :-1], words[:, 1:]


ENCODER = ["moe.layers=none", "model.architecture=encoder", "train.objective=masked"]
BOTH = ["moe.layers=none", "model.architecture=encoder_decoder", "train.objective=span_corruption"]
POST_INSERTED = ["model.norm_position=post", "moe.layers={insert_after: [1]}"]
SIZES: dict[str, list[str]] = {
    "as it is": [],
    "dense": ["moe.layers=none"],
    "second block": ["model.num_layers=3", "moe.layers={every: 2}"],
    "listed blocks": ["model.num_layers=4", "moe.layers={at: [1, 4]}"],
    "learned positions": ["model.position=learned"],
    "layernorm with biases": ["model.norm=layernorm", "model.bias=true", "moe.layers={at: [1]}"],
    "layernorm without biases": ["model.norm=layernorm", "moe.layers=none"],
    "gelu with biases": ["model.activation=gelu", "model.bias=true", "moe.layers=none"],
    "gelu experts": ["model.activation=gelu"],
    "geglu with biases": ["model.activation=geglu", "model.bias=true", "moe.layers={at: [2]}"],
    "relu": ["model.activation=relu", "moe.layers={at: [2]}"],
    "gated experts beside dense blocks without": [
        "model.activation=gelu",
        "moe.expert_activation=reglu",
        "moe.layers={at: [2]}",
        "moe.num_shared_experts=1",
    ],
    "query groups": ["model.num_attention_heads=4", "model.num_query_groups=2", "model.bias=true"],
    "untied": ["model.tie_embeddings=false"],
    "default FFN sizes": ["model.ffn_hidden_size=null", "moe.expert_ffn_hidden_size=null"],
    "shared experts": ["moe.num_shared_experts=2"],
    "shared experts with a gate": ["moe.num_shared_experts=2", "moe.shared_expert_mode=gated"],
    "residual shared experts": ["moe.num_shared_experts=1", "moe.shared_expert_mode=residual"],
    "shared experts of a size of their own, a router's bias": [
        "moe.num_shared_experts=2",
        "moe.shared_expert_ffn_hidden_size=20",
        "moe.router.scorer={name: linear, bias: true}",
    ],
    "biases of experts": ["moe.expert_bias=true", "model.activation=swiglu_clamped", "moe.layers={at: [2]}"],
    "latent experts": ["moe.latent_size=8", "moe.num_shared_experts=1", "moe.expert_bias=true"],
    "experts without computation": ["moe.zero_experts={identity: 2, zero: 1, constant: 2}"],
    "biases of sub-layers": ["moe.expert_bias=true", "moe.expert_sublayers=2", "model.activation=gelu"],
    "multi-token prediction": ["model.multi_token_prediction.depth=2", "model.bias=true"],
    "multi-token prediction without a last norm": [
        "model.multi_token_prediction.depth=1",
        "model.norm_position=post",
        "moe.layers={at: [1]}",
    ],
    "multi-token prediction with inserted layers": [
        "model.multi_token_prediction.depth=1",
        "moe.layers={insert_after: [2]}",
    ],
    "sub-layers": ["moe.expert_sublayers=2"],
    "sub-layers with layernorm": ["moe.expert_sublayers=3", "model.norm=layernorm"],
    "inserted": ["moe.layers={insert_after: [2]}"],
    "inserted, layernorm and biases": [
        "moe.layers={insert_after: [1, 2]}",
        "model.norm=layernorm",
        "model.bias=true",
    ],
    "inserted and in place": ["model.num_layers=3", "moe.layers={at: [3], insert_after: [1]}"],
    "inserted sub-layers": ["moe.layers={insert_after: [1]}", "moe.expert_sublayers=3"],
    "another scorer": ["moe.router.scorer=cosine"],
    "a scorer that reads words": ["moe.router.scorer=stable", "model.vocab_multiple=64"],
    "latent attention": [
        "model.latent={query_rank: 5, key_value_rank: 6, nope_size: 4, rope_size: 2, value_size: 3}",
        "model.attention={sinks: true, output_bias: true}",
    ],
    "latent keys and values, layernorm": [
        "model.latent={key_value_rank: 6, nope_size: 4, rope_size: 2, value_size: 7}",
        "model.norm=layernorm",
        "model.num_attention_heads=3",
    ],
    "padding": ["model.vocab_multiple=64"],
    "a head size": ["model.head_size=12", "model.num_query_groups=1", "model.attention={input_bias: true}"],
    "norms of heads": ["model.attention={query_key_norm: head, output_bias: true, sinks: true}"],
    "norms of all heads": [
        "model.attention={query_key_norm: whole, output_bias: false}",
        "model.norm=layernorm",
        "model.bias=true",
        "model.num_query_groups=1",
    ],
    "encoder": [*ENCODER, "model.head_transform=true"],
    "encoder, inserted": [*ENCODER, *POST_INSERTED, "model.position=learned"],
    "encoder, sub-layers": [*ENCODER, *POST_INSERTED, "moe.expert_sublayers=2"],
    "encoder-decoder": [
        *BOTH,
        "model.encoder_layers=3",
        "moe.layers={encoder: {at: [1]}, decoder: {every: 2}}",
        "model.tie_embeddings=false",
    ],
    "encoder-decoder, inserted": [
        *BOTH,
        "model.encoder_layers=3",
        "moe.layers={decoder: {insert_after: [1]}}",
        "model.norm_position=post",
        "model.bias=true",
    ],
}


@pytest.mark.parametrize("case", SIZES)
def test_size_is_that_of_the_built_model(one_rank: None, case: str) -> None:
    config = tiny(*SIZES[case])
    model = tiny_model(config)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".layer.experts." in name)
    size = model_size(config, VOCABULARY)
    assert size.total == sum(parameter.numel() for parameter in model.parameters())
    assert size.expert == experts
    assert size.on_rank(1, 4) == (size.total - experts, experts / 4)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_a_dense_ffn_is_its_formula(one_rank: None, activation: str) -> None:
    config = tiny(
        f"model.activation={activation}", "model.bias=true", "model.init_std=0.4", "moe.layers=none"
    )
    ffn = tiny_gpt(config).model.decoder.layers[0].mlp
    for bias in (ffn.linear_fc1.bias, ffn.linear_fc2.bias):
        bias.data.copy_(torch.linspace(-1, 1, len(bias)))
    hidden_SBH = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(1))
    output_SBH, output_bias = ffn(hidden_SBH)  # Megatron-Core leaves the second bias to the residual's sum
    inner = hidden_SBH @ ffn.linear_fc1.weight.T + ffn.linear_fc1.bias
    expected_SBH = plain_activation(inner, activation) @ ffn.linear_fc2.weight.T
    torch.testing.assert_close(output_SBH, expected_SBH, rtol=1e-4, atol=1e-5)
    assert torch.equal(output_bias, ffn.linear_fc2.bias)


def test_experts_may_have_another_activation_than_dense_blocks(one_rank: None) -> None:
    for own, expected in (("null", "gelu"), ("reglu", "reglu")):
        config = tiny(
            "model.activation=gelu",
            f"moe.expert_activation={own}",
            "moe.layers={at: [2]}",
            "moe.num_shared_experts=1",
        )
        model = tiny_gpt(config)
        ((_, layer),) = model.moe_layers()
        assert layer.shared is not None
        assert layer.experts.activation == layer.shared.activation == expected
        assert model.model.decoder.layers[0].mlp.linear_fc1.weight.shape == (24, 16)
        halves = 2 if expected == "reglu" else 1
        assert layer.experts.up.shape == (4, halves * 12, 16)
        assert shardings(model)["model.decoder.layers.1.mlp.layer.experts.up"].slices == (1, halves)


def test_size_by_hand() -> None:
    """Hidden 16, vocabulary 48 (tied), a dense block (FFN 24), one of 4 experts (FFN 12) and one shared."""
    embedding = 48 * 16
    attention = 16 * 48 + 16 * 16  # query, key and value; output
    norms = 2 * 2 * 16 + 16  # two a block, one at the end
    dense_ffn = 3 * 16 * 24  # gate, value, down
    expert = 3 * 16 * 12
    router = 4 * 16
    always = embedding + 2 * attention + norms + dense_ffn + router + expert
    size = model_size(tiny("moe.layers={at: [2]}", "moe.num_shared_experts=1", "moe.router.selector.k=3"), 48)
    assert (size.total, size.active, size.expert) == (always + 4 * expert, always + 3 * expert, 4 * expert)


def test_active_experts_are_those_that_the_selector_counts_with() -> None:
    config = tiny("moe.router={scorer: hierarchical, selector: hierarchical_top_k}", "moe.num_experts=16")
    size = model_size(config, VOCABULARY)
    assert mean_choices(config.moe) == 4  # 2 experts in each of 2 groups
    assert size.total - size.active == 2 * (16 - 4) * 3 * 16 * 12  # blocks, experts not met, each one's size


def test_parameters_of_losses_are_counted(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    class Learned(Part):
        @dataclass
        class Config:
            weight: float = 0.1

        def __init__(self, config: Config, dims: Dims) -> None:
            super().__init__(config, dims)
            self.vector = nn.Parameter(torch.zeros(dims.num_experts))

    before = model_size(tiny(), VOCABULARY).total
    monkeypatch.setitem(registry._parts["loss"], "learned", Learned)
    config = tiny("moe.losses.learned=0.1")
    assert model_size(config, VOCABULARY).total == before + 2 * 4
    assert before + 2 * 4 == sum(parameter.numel() for parameter in tiny_gpt(config).parameters())


def test_vocabulary_is_padded_to_the_next_multiple() -> None:
    assert [padded_vocab_size(size, 64) for size in (1, 63, 64, 65, 257)] == [64, 64, 64, 128, 320]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("every: 1", [1, 2, 3, 4]),
        ("every: 2", [2, 4]),
        ("every: 3", [3]),
        ("at: [4, 1]", [1, 4]),
        ("every: 2, at: [1]", [1, 2, 4]),
        ("insert_after: [3, 1]", [1, 3]),
        ("every: 2, insert_after: [3]", [2, 3, 4]),
        ("", []),
    ],
)
def test_numbers_of_the_moe_blocks(one_rank: None, layers: str, expected: list[int]) -> None:
    config = tiny("model.num_layers=4", f"moe.layers={{{layers}}}")
    assert moe_layer_numbers(config) == expected
    assert [number for number, _ in tiny_gpt(config).moe_layers()] == expected


def test_loss_is_the_cross_entropy_of_the_models_own_logits(one_rank: None) -> None:
    model = tiny_gpt(tiny("model.init_std=0.5"))
    tokens, labels = text(rows=3)
    losses = model(tokens, POSITIONS.expand_as(tokens), labels)
    logits = model.whole_logits(tokens, POSITIONS.expand_as(tokens))
    expected = logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]
    assert losses.shape == (3, S) and losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected)


def test_label_smoothing_shares_evenly_among_the_other_words(one_rank: None) -> None:
    """The target gives 1 - e to the label and e / (V - 1) to each other word of the padded vocabulary V."""
    model = tiny_gpt(tiny("model.init_std=0.5", "model.vocab_multiple=64"))
    tokens, labels = text()
    losses = model(tokens, POSITIONS, labels, label_smoothing=0.1)
    log_probs = model.whole_logits(tokens, POSITIONS).log_softmax(-1)
    target = torch.full_like(log_probs, 0.1 / 63).scatter(-1, labels[..., None], 0.9)
    torch.testing.assert_close(losses, -(target * log_probs).sum(-1))


def test_a_new_model_predicts_evenly(one_rank: None) -> None:
    tokens, labels = text(rows=8)
    losses = tiny_gpt(tiny())(tokens, POSITIONS.expand_as(tokens), labels)
    assert float(losses.detach().mean()) == pytest.approx(math.log(VOCABULARY), abs=0.02)


@pytest.mark.parametrize("overrides", [["moe.layers=none"], [], ["model.position=learned"]])
def test_no_token_sees_a_later_one(one_rank: None, overrides: list[str]) -> None:
    model = tiny_gpt(tiny("model.init_std=0.5", *overrides))
    tokens, labels = text()
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCABULARY
    before, after = (model(words, POSITIONS, labels)[0] for words in (tokens, changed))
    torch.testing.assert_close(before[:5], after[:5], rtol=0, atol=1e-5)
    assert ((before[5:] - after[5:]).abs() > 1e-4).all()


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_the_order_of_what_came_before_matters(one_rank: None, position: str) -> None:
    """One block alone sees the tokens before as a set, but for their positions."""
    one_block = tiny("model.num_layers=1", "model.init_std=0.5", f"model.position={position}")
    tokens, labels = text()
    swapped = tokens[:, [1, 0, *range(2, S)]]
    before, after = (tiny_gpt(one_block)(words, POSITIONS, labels)[0, 2:] for words in (tokens, swapped))
    assert ((before - after).abs() > 1e-4).all()


@pytest.mark.parametrize("kernels", ["compiled", "plain"])
@pytest.mark.parametrize(("recompute", "position"), [("none", "rope"), ("none", "learned"), ("full", "rope")])
def test_packed_documents_have_the_losses_and_gradients_of_separate_ones(
    one_rank: None, kernels: str, recompute: str, position: str
) -> None:
    """Two packed sequences against five batches of one document each; together without limits they differ."""
    if kernels == "compiled" and find_library()[0] is None:
        pytest.skip(find_library()[1])
    options = [f"model.cpu_kernels={kernels}", f"model.recompute={recompute}", f"model.position={position}"]
    length = 140
    model = tiny_gpt(tiny("model.init_std=0.3", f"data.sequence_length={length}", *options))
    words = torch.randint(1, VOCABULARY, (2, length + 1), generator=torch.Generator().manual_seed(3))
    for row, place in ((0, 63), (0, 64), (1, 99)):
        words[row, place] = 0
    tokens, labels = words[:, :-1], words[:, 1:]
    items = [document_items(row, eod=0) for row in tokens]
    documents = Documents.of(torch.stack([item["document_start"] for item in items]))
    assert documents.bounds == (0, 64, 65, 140, 240, 280)
    weights = list(model.parameters())
    positions = torch.stack([item["position_ids"] for item in items])
    packed = model(tokens, positions, labels, documents)
    found = torch.autograd.grad(packed.sum(), weights)
    alone, expected = [], [torch.zeros_like(weight) for weight in weights]
    for first, last in pairwise(documents.bounds):
        some, theirs = (side.flatten()[None, first:last] for side in (tokens, labels))
        losses = model(some, torch.arange(last - first)[None], theirs)
        alone.append(losses[0])
        for total, gradient in zip(expected, torch.autograd.grad(losses.sum(), weights), strict=True):
            total += gradient
    torch.testing.assert_close(packed.flatten(), torch.cat(alone), rtol=1e-6, atol=2e-6)
    assert not torch.allclose(model(tokens, positions, labels)[0, 64:], packed[0, 64:], atol=1e-3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * max(1.0, float(other.abs().max())))


def test_the_seed_decides_the_weights(one_rank: None) -> None:
    models = [tiny_gpt(tiny(f"seed={seed}")) for seed in (7, 7, 8)]
    first, same, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    drawn = [name for name in first if first[name].dim() > 1]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


@pytest.mark.parametrize(
    ("scaling", "std", "of_writers"),
    [
        ((), 0.1, 0.05),
        (("model.init_depth_scaling=none",), 0.1, 0.1),
        (("model.init_depth_scaling=none", "model.mup={base: 32}"), 0.05, 0.05),
    ],
)
def test_spread_of_the_weights_at_the_start(
    one_rank: None, scaling: tuple[str, ...], std: float, of_writers: float
) -> None:
    """Weights that write into the residual start with std / sqrt(2 * layers), here 2 blocks, or with std; by
    muP embeddings start with std, and the router with std / m, here 4.
    """
    config = tiny(
        *scaling,
        "model.hidden_size=128",
        "model.ffn_hidden_size=256",
        "model.init_std=0.1",
        "moe.layers={at: [2]}",
        "moe.expert_ffn_hidden_size=128",
        "moe.num_shared_experts=1",
    )
    writers = ("linear_proj.weight", "linear_fc2.weight", "experts.down", "shared.down")
    seen = set()
    for name, parameter in tiny_gpt(config).named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        expected = of_writers if name.endswith(writers) else std
        if "model.mup={base: 32}" in scaling:
            expected = {"word_embeddings.weight": 0.1, "scorer.weight": 0.025}.get(
                ".".join(name.split(".")[-2:]), expected
            )
        assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.1), name
        seen |= {writer for writer in writers if name.endswith(writer)}
    assert seen == set(writers)


def test_all_weights_start_small_where_asked(one_rank: None) -> None:
    """init_scale s: truncated normal of std sqrt(s / fan_in), cut at two of them (which leaves 0.88)."""
    config = tiny(
        "model.hidden_size=64",
        "model.ffn_hidden_size=128",
        "model.init_scale=0.1",
        "model.position=learned",
        "model.tie_embeddings=false",
        "moe.layers={at: [2]}",
        "moe.expert_ffn_hidden_size=96",
        "moe.num_shared_experts=1",
    )
    drawn: dict[str, Tensor] = {}
    for name, parameter in tiny_gpt(config).named_parameters():
        if parameter.dim() > 1:
            std = math.sqrt(0.1 / parameter.shape[-1])
            assert float(parameter.detach().std()) == pytest.approx(0.88 * std, rel=0.1), name
            assert parameter.abs().max() <= 2 * std, name
            drawn[name] = parameter.detach()
    # Embeddings 2, attention 2 x 2, dense FFN 2, router 1, experts and shared experts 2 x 2, output 1.
    assert len(drawn) == 14
    start = [weight.flatten()[:3].div(math.sqrt(1 / weight.shape[-1])) for weight in drawn.values()]
    assert len({tuple(values.tolist()) for values in start}) == 14


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_one_matrix(one_rank: None, tied: bool) -> None:
    model = tiny_gpt(tiny(f"model.tie_embeddings={str(tied).lower()}"))
    embedding = model.model.embedding.word_embeddings.weight
    # Both ends have the weight's gradient only if it stands at both.
    tokens = torch.full((1, S), 3)
    model(tokens, POSITIONS, torch.full((1, S), 5)).sum().backward()
    assert embedding.grad is not None
    assert bool(embedding.grad[5].any()) == tied
    output = model.model.output_layer.weight
    assert (output is None or output.data_ptr() == embedding.data_ptr()) == tied
