"""The model FLOPs against those that PyTorch counts in a forward pass."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megamoe.config.shapes import moe_layer_numbers, query_size
from megamoe.metrics.gpus import peak_of_device
from megamoe.model.size import PASSES, StackShares, block_flops, model_flops
from megamoe.moe.experts.grouped import GroupedExperts
from tests.support.moe.plain import loop_experts
from tests.support.tiny import VOCABULARY, tiny, tiny_gpt

LATENT = "key_value_rank: 6, nope_size: 8, rope_size: 4, value_size: 12"
CASES = {
    "dense": ["moe.layers=none", "model.num_query_groups=1", "model.tie_embeddings=false"],
    "moe": ["moe.layers.every=2", "moe.num_shared_experts=1", "model.activation=gelu"],
    "latent attention": ["moe.layers=none", f"model.latent={{{LATENT}}}"],
    "latent queries": ["moe.layers=none", f"model.latent={{query_rank: 5, {LATENT}}}"],
    "latent experts": ["moe.latent_size=8", "moe.num_shared_experts=1"],
    "shared experts of a size of their own": [
        "moe.num_shared_experts=2",
        "moe.shared_expert_ffn_hidden_size=20",
    ],
    "multi-token prediction": ["model.multi_token_prediction.depth=2", "moe.layers={at: [2]}"],
    "inserted": ["moe.layers={insert_after: [1]}", "moe.expert_sublayers=2"],
    "heads of another size": ["model.head_size=10", "model.num_query_groups=1"],
}


def test_what_follows_the_blocks_has_the_layer_that_prediction_inserts() -> None:
    """Multi-token prediction repeats the last block, with the MoE layer that follows it."""
    inserted = ("moe.layers={insert_after: [2]}", "model.multi_token_prediction.depth=2")
    config = tiny(*inserted, "moe.router.selector={name: top_k, k: 2}")
    blocks, after = block_flops(config, VOCABULARY)
    whole = model_flops(config, VOCABULARY).of_step(1, dict.fromkeys(moe_layer_numbers(config), 2))
    assert sum(blocks) + after == pytest.approx(whole)


def test_the_transform_of_a_masked_models_head_is_a_matrix_for_each_prediction() -> None:
    masked = ("train.objective=masked", "model.architecture=encoder")
    plain, transformed = (
        model_flops(tiny(*masked, f"model.head_transform={on}"), VOCABULARY, StackShares({}, 0.25)).token
        for on in ("false", "true")
    )
    assert transformed - plain == PASSES * 2 * 0.25 * 16 * 16


def test_further_blocks_compute_as_much_as_their_decoder() -> None:
    """Half of the tokens are padding: all but the scores, which fall with the square, is half."""

    def added(share: float) -> float:
        whole, without = (
            model_flops(
                tiny("moe.layers=none", "model.num_layers=1", f"model.multi_token_prediction.depth={depth}"),
                VOCABULARY,
                StackShares({"encoder": share, "decoder": share}, share),
            ).token
            for depth in (1, 0)
        )
        return whole - without

    assert 0.25 * added(1.0) < added(0.5) < 0.5 * added(1.0)
    assert added(0.5) == pytest.approx(10560)


@pytest.mark.parametrize("case", CASES)
def test_flops_are_those_of_pytorchs_counter(
    one_rank: None, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of attention on the CPU is left out: it depends on the version. Experts are our own loop."""
    config = tiny(*CASES[case], "model.cpu_kernels=plain", "moe.router.selector={name: top_k, k: 2}")
    model = tiny_gpt(config).eval()
    monkeypatch.setattr(GroupedExperts, "_ffn", plain_ffn)
    tokens_BS = torch.randint(0, VOCABULARY, (2, 8))
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(tokens_BS, torch.arange(8).expand(2, 8), tokens_BS, None)
    layers = list(model.moe_layers())
    flops = model_flops(config, VOCABULARY)
    # Of a token and block: products of heads with half of 8 keys, and with values, 2 FLOPs each.
    columns = 2 * query_size(config.model) if config.model.latent is None else 2 * (12 + 12)
    blocks = config.model.num_layers + config.model.multi_token_prediction.depth
    attention = 16 * blocks * 2 * columns * 8 / 2
    expected = flops.of_step(16, {number: 2 * 16 for number, _ in layers}) / PASSES
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for operator, count in counted.items() if "attention" not in str(operator))
    assert products + attention == expected


def test_a_window_counts_the_keys_that_it_shows() -> None:
    """Of 8 keys a query sees 4 on average; in a window of 3, all but half of it: 3 - 3^2 / 16."""
    whole, windowed = (
        model_flops(tiny(f"model.attention={{{keys}}}"), VOCABULARY).token
        for keys in ("", "window: 3, window_blocks: [2]")
    )
    assert whole - windowed == pytest.approx(PASSES * 2 * 2 * 16 * (4 - (3 - 9 / 16)))


def plain_ffn(
    experts: GroupedExperts, rows_NH: torch.Tensor, counts_E: torch.Tensor, *others: object
) -> torch.Tensor:
    return loop_experts(experts, rows_NH, counts_E)


def test_peaks_of_devices() -> None:
    assert peak_of_device("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_of_device("NVIDIA H100 80GB HBM3", "fp32") == 67e12
    assert peak_of_device("NVIDIA H200", "fp16") == 989.5e12
    for unknown in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA GeForce RTX 4090", "A1000"):
        assert peak_of_device(unknown, "bf16") is None
