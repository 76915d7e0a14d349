"""Checks that run in a separate process, with fake versions of Transformer Engine and Apex.

    PYTHONPATH=tests/support/fakes:. python -m tests.support.model.check_fakes

prints, as JSON, each check's name and its traceback, empty if it passed. Megatron-Core looks for Transformer
Engine when it is imported, so a test of the main process cannot change it.
"""

from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import transformer_engine
from megatron.core.fp8_utils import get_fp8_recipe
from torch import Tensor
from transformer_engine.common.recipe import Float8CurrentScaling, Format, MXFP8BlockScaling
from transformer_engine.pytorch import fp8_autocast
from transformer_engine.pytorch.attention import rope
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

from megamoe.checkpoint.state import weight_chunks
from megamoe.errors import UserError
from megamoe.kernels.choice import Kernels
from megamoe.model import backends
from megamoe.model.architectures.decoder import GPT
from megamoe.model.modules import EngineProduct, transformer_engine_grouped_linear
from megamoe.model.stage import StageBlocks
from megamoe.moe.experts import grouped
from megamoe.moe.experts.grouped import GroupedExperts, Products
from megamoe.moe.router import Router
from megamoe.parallel import launch
from megamoe.parallel.layout import Layout
from tests.support.in_subprocess import checks_of, run_checks
from tests.support.model import runs_on_fakes
from tests.support.model.with_fakes import calls, pretend_cuda
from tests.support.moe.plain import loop_experts
from tests.support.ranks.runs import ds_config
from tests.support.tiny import VOCABULARY, tiny, tiny_gpt
from tests.support.tiny import check_on as refuse


def output_of(model: GPT, rows: int, **inputs: Any) -> Tensor:
    """Return the losses [rows, 8], or a pipeline stage's hidden states [8, rows, H]."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, VOCABULARY, (rows, 9), generator=generator)
    positions = torch.arange(8)[None].expand(rows, -1)
    return model(words[:, :-1], positions, words[:, 1:], **inputs)


def loss_of(model: GPT, rows: int = 2) -> Tensor:
    return output_of(model, rows).mean()


def both(*overrides: str) -> tuple[GPT, GPT]:
    """Return the same model on PyTorch and on Transformer Engine, in training."""
    models = [tiny_gpt(tiny(f"model.backend={name}", *overrides)) for name in ("torch", "transformer_engine")]
    return models[0].train(), models[1].train()


MODELS = {
    "as it is": (),
    "dense and MoE": ("moe.layers={at: [2]}", "model.norm=layernorm", "model.bias=true"),
    "query groups": ("model.num_attention_heads=4", "model.num_query_groups=2", "moe.layers=none"),
    "gelu and shared experts": ("model.activation=gelu", "moe.num_shared_experts=1"),
    "two activations": ("model.activation=relu", "moe.expert_activation=geglu", "moe.layers={at: [2]}"),
    "stacks, inserted": ("moe.layers={insert_after: [1]}", "moe.expert_sublayers=2"),
    "inserted with a norm": ("moe.layers={at: [1], insert_after: [2]}",),
    "recomputed": ("moe.layers={at: [2]}", "model.recompute=full"),
    "latent attention": (
        "model.latent={query_rank: 6, key_value_rank: 6, nope_size: 4, rope_size: 2, value_size: 3}",
        "model.rotary={interleaved: true, scaling: yarn, factor: 4, original_length: 8, mscale_all_dim: 1}",
    ),
    "all tokens to one expert": (
        "moe.router.selector={name: top_k, k: 1, weights: raw}",
        "moe.num_experts=64",
    ),
}


def check_loss_gradients_start_and_names_are_those_of_the_torch_backend() -> None:
    for name, overrides in MODELS.items():
        plain, engine = both(*overrides)
        calls()
        expected, found = ([*weight_chunks(model, Layout(1), 0)] for model in (plain, engine))
        assert [(p.name, p.chunk) for p in found] == [(p.name, p.chunk) for p in expected], name
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one.tensor, other.tensor), (name, one.name)
        losses = [loss_of(model) for model in (plain, engine)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss in losses:
            loss.backward()
        weights = dict(plain.named_parameters())
        assert list(weights) == [key for key, _ in engine.named_parameters()], name
        for key, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, weights[key].grad, rtol=1e-4, atol=1e-6, msg=key)
        kinds = [type(call.module).__name__ for call in calls()]
        layers = [layer for _, layer in engine.moe_layers()]
        again = 2 if "recomputed" in name else 1
        sublayers = 2 if "stacks" in name else 1
        assert kinds.count("GroupedLinear") == 2 * sublayers * again * len(layers), name
        projections = 4 if "latent" in name else 1
        ffns = 2 - len(set(layers) - inserted(engine))
        assert kinds.count("TEColumnParallelLinear") == again * (2 * projections + ffns), name


def inserted(model: GPT) -> set[Any]:
    return {block.inserted.layer for block in model.model.decoder.layers if block.inserted is not None}


def check_norms_are_the_engines() -> None:
    _, engine = both("moe.layers={at: [1], insert_after: [2]}")
    kinds = [type(module).__name__ for module in engine.modules()]
    assert kinds.count("RMSNorm") == 2 * 2 + 1 + 1  # two a block, before the inserted layer, at the end
    assert kinds.count("TEDotProductAttention") == 2
    assert "SDPAttention" not in kinds
    _, masked = both("data.document_aware=true")
    kinds = [type(module).__name__ for module in masked.modules()]
    assert (kinds.count("SDPAttention"), kinds.count("TEDotProductAttention")) == (2, 0)


def make_experts(products: Products) -> GroupedExperts:
    return GroupedExperts(
        32, 64, range(3), activation="swiglu", std=0.4, output_std=0.4, seed=1, layer=1, products=products
    )


def check_products_of_no_rows() -> None:
    experts = make_experts(transformer_engine_grouped_linear("none"))
    generator = torch.Generator().manual_seed(0)
    for counts in ([0, 5, 0], [0, 0, 0], [4, 0, 3]):
        counts_E = torch.tensor(counts)
        rows_NH = torch.randn(sum(counts), 32, generator=generator, requires_grad=True)
        found_NH = experts(rows_NH, counts_E)
        torch.testing.assert_close(found_NH, loop_experts(experts, rows_NH, counts_E))
        found_NH.sum().backward()
        assert experts.up.grad is not None
        assert [bool(grad.any()) for grad in experts.up.grad] == [count > 0 for count in counts]
        experts.zero_grad()
    assert not list(experts.get_submodule("up_product").parameters()), (
        "the weights are the stacked ones alone"
    )
    assert {name for name, _ in experts.named_parameters()} == {"up", "down"}


def check_rows_are_filled_up_to_what_fp8_needs() -> None:
    for fp8, recipe, unit in (("tensorwise", Float8CurrentScaling(), 16), ("mxfp8", MXFP8BlockScaling(), 32)):
        experts = make_experts(transformer_engine_grouped_linear(fp8)).bfloat16()
        counts_E = torch.tensor([1, 0, unit + 1])
        rows_NH = torch.randn(unit + 2, 32).bfloat16().requires_grad_()
        calls()
        # What the CPU's own kernels want would hide it.
        with fp8_autocast(fp8_recipe=recipe), mock.patch.object(grouped, "PADDED_ROWS", 1):
            found_NH = experts(rows_NH, counts_E)
        assert [(call.fp8, call.rows) for call in calls()] == [(True, [unit, 0, 2 * unit])] * 2
        exact_NH = loop_experts(experts.float(), rows_NH.float(), counts_E)
        assert (found_NH - exact_NH).norm() < 0.01 * exact_NH.norm()
        found_NH.sum().backward()
        assert rows_NH.grad is not None and rows_NH.grad.any(1).all()


FP8_SIZES = (
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "moe.expert_ffn_hidden_size=32",
    "moe.layers={at: [2]}",
    "moe.num_shared_experts=1",
    "train.micro_batch_size=4",
)


def in_bf16(model: GPT) -> GPT:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def check_every_product_of_a_block_is_in_fp8_and_the_router_is_not() -> None:
    for fp8, kind in (
        ("delayed", "TEDelayedScaling"),
        ("tensorwise", "Float8CurrentScaling"),
        ("blockwise", "Float8BlockScaling"),
        ("mxfp8", "MXFP8BlockScaling"),
    ):
        plain, engine = both(*FP8_SIZES, f"model.fp8={fp8}")
        exact = loss_of(in_bf16(plain), rows=4)
        seen: list[Any] = []
        watch_routers(engine, seen)
        calls()
        loss = loss_of(in_bf16(engine), rows=4)
        loss.backward()
        torch.testing.assert_close(loss, exact, rtol=1e-2, atol=0)
        # Two blocks' attention, one dense FFN, one layer of experts.
        found = calls()
        assert [type(call.module).__name__ for call in found].count("GroupedLinear") == 2
        assert len(found) == 8 and all(call.fp8 for call in found)
        assert [(dtype, type(recipe).__name__) for dtype, recipe in seen] == [(torch.float32, kind)]


def check_products_in_fp8_take_changed_weights() -> None:
    """A second step multiplies by the weights after the update, not by copies of the first step."""
    plain, engine = (in_bf16(model) for model in both(*FP8_SIZES, "model.fp8=tensorwise"))
    for model in (plain, engine):
        scale(model, "word_embeddings", 50)  # or every loss is near that of equal logits
    before = [loss_of(model, rows=4) for model in (plain, engine)]
    for model in (plain, engine):
        scale(model, "linear_proj", 1000)
    after = [loss_of(model, rows=4) for model in (plain, engine)]
    torch.testing.assert_close(after[1], after[0], rtol=1e-2, atol=0)
    assert abs(float(after[0] - before[0])) > 0.1, (before, after)


def scale(model: GPT, name: str, factor: float) -> None:
    """Multiply the weights whose names have this part."""
    for key, parameter in model.named_parameters():
        if name in key:
            parameter.data *= factor


def watch_routers(model: GPT, seen: list[Any]) -> None:
    def note(module: Router, inputs: Any, routing: Any) -> None:
        assert not any("transformer_engine" in type(part).__module__ for part in module.modules())
        seen.append((routing.scores_TE.dtype, FP8GlobalStateManager.get_fp8_recipe()))

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(note)


def check_what_is_recomputed_is_in_fp8_again() -> None:
    for fp8 in ("delayed", "tensorwise"):
        for recompute, products in (("none", 8), ("selective", 8 + 2), ("full", 16)):
            _, engine = both(*FP8_SIZES, f"model.fp8={fp8}", f"model.recompute={recompute}")
            calls()
            loss_of(in_bf16(engine), rows=4).backward()
            found = calls()
            assert len(found) == products and all(call.fp8 for call in found), (recompute, len(found))
            assert all(layer.recomputing is False for _, layer in engine.moe_layers())
            with torch.no_grad():
                loss_of(engine.eval(), rows=4)
            assert len(calls()) == 8


def check_pipeline_stages_compute_in_fp8() -> None:
    """Two stages of a block each have the whole model's loss; every block has its number in FP8."""
    for fp8 in ("delayed", "tensorwise"):
        whole, *stages = (in_bf16(both(*FP8_SIZES, f"model.fp8={fp8}")[1]) for _ in range(3))
        expected = loss_of(whole, rows=4)
        for number, stage in enumerate(stages):
            stage.cut(StageBlocks(number, 2, (range(number, number + 1),)))
        calls()
        hidden_SBH = output_of(stages[0], 4)
        assert len(calls()) == 4  # attention and a dense FFN
        torch.testing.assert_close(
            output_of(stages[1], 4, hidden_SBH=hidden_SBH).mean(), expected, rtol=0, atol=0
        )
        assert len(calls()) == 4  # attention and experts


def check_the_options_of_fp8_reach_the_recipe() -> None:
    def recipe(*overrides: str) -> Any:
        return get_fp8_recipe(both(*FP8_SIZES, *overrides)[1].model.config)

    usual = recipe("model.fp8=delayed")
    assert (usual.fp8_format, usual.amax_history_len, usual.amax_compute_algo) == (Format.HYBRID, 1024, "max")
    assert recipe("model.fp8=delayed", "model.fp8_amax_history=16").amax_history_len == 16
    assert recipe("model.fp8=delayed", "model.fp8_format=e4m3").fp8_format is Format.E4M3
    assert recipe("model.fp8=blockwise").fp8_format is Format.E4M3
    assert recipe("model.fp8=mxfp8", "model.fp8_format=hybrid").fp8_format is Format.HYBRID


def refusal(*overrides: str) -> str:
    bf16 = (f"parallel.deepspeed={ds_config('zero1_bf16')}", "moe.expert_ffn_hidden_size=16")
    try:
        refuse(tiny(*bf16, *overrides), 1)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def check_what_fp8_cannot_do_is_refused() -> None:
    fp8 = ("model.fp8=delayed", *FP8_SIZES)
    assert refusal(*fp8) == ""
    assert "the precision is fp32" in refusal(*fp8, f"parallel.deepspeed={ds_config('zero1_fp32')}")
    assert "model.backend is torch" in refusal(*fp8, "model.backend=torch")
    for key, override in {
        "train.micro_batch_size x data.sequence_length: 8 ": "train.micro_batch_size=1",
        "model.hidden_size: 24 ": "model.hidden_size=24",
        "query, key and value together": "model.num_attention_heads=8,model.num_query_groups=1",
        "model.ffn_hidden_size: 72 ": "model.ffn_hidden_size=72",
        "moe.expert_ffn_hidden_size (default: the dense blocks'): 40 ": "moe.expert_ffn_hidden_size=40",
    }.items():
        found = refusal(*fp8, *override.split(","))
        assert found.startswith(key) and "a multiple of 16" in found, found
    assert refusal(*fp8, "model.ffn_hidden_size=72", "moe.layers={every: 1}") == ""
    assert "multiple of 32" in refusal(*fp8, "model.fp8=mxfp8", "moe.expert_ffn_hidden_size=48")
    assert "is for delayed scaling" in refusal(*fp8, "model.fp8=mxfp8", "model.fp8_amax_history=4")
    FP8GlobalStateManager.reason = "Device compute capability 8.9 or higher required for FP8 execution."
    try:
        assert "this device cannot: Device compute capability 8.9 or higher" in refusal(*fp8)
    finally:
        FP8GlobalStateManager.reason = ""


def check_the_summary_says_what_is_used() -> None:
    def rows(*overrides: str) -> tuple[str, str]:
        found = backends.backend_rows(tiny(*overrides), Kernels())
        return found["Transformer Engine"], found["Apex"]

    assert rows() == ("2.20.2, not used (model.backend: auto takes it for FP8 alone)", "norms")
    engine = "model.backend=transformer_engine"
    assert rows(engine) == ("2.20.2: attention, norms, grouped experts", "none")
    dense = "linear layers of attention, its core by PyTorch, norms, dense FFN"
    assert rows(engine, "moe.layers=none", "data.document_aware=true")[0] == f"2.20.2: {dense}"
    mixed = "attention, norms, dense FFN, grouped experts, fp8 delayed (hybrid)"
    assert rows("moe.layers={at: [2]}", "model.fp8=delayed")[0] == f"2.20.2: {mixed}"
    assert rows("model.backend=torch") == ("2.20.2, not used (model.backend: torch)", "norms")
    assert rows("model.backend=torch", "model.norm_kernel=torch")[1] == "none"


def check_an_engine_that_cannot_be_used_is_left_alone() -> None:
    transformer_engine.__version__ = "2.2.1"
    backends.find_transformer_engine.cache_clear()
    try:
        assert not backends.uses_transformer_engine(tiny().model)
        asked = refusal("model.backend=transformer_engine")
        assert "Transformer Engine 2.2.1 is older than 2.3; install" in asked, asked
    finally:
        transformer_engine.__version__ = "2.20.2"
        pretend_cuda()
    backends.has_cuda = lambda: False
    backends.find_transformer_engine.cache_clear()
    try:
        assert not backends.uses_transformer_engine(tiny().model)
        assert "there is no CUDA device" in refusal("model.backend=transformer_engine")
        assert "there is no CUDA device" in backends.backend_rows(tiny(), Kernels())["Transformer Engine"]
    finally:
        pretend_cuda()
    assert "has its own norms" in refusal("model.norm_kernel=apex", "model.backend=transformer_engine")


def check_rotary_positions_are_fused() -> None:
    """Queries and keys of both blocks; under PyTorch's attention, for documents, too."""
    for settings in ((), ("data.document_aware=true",)):
        rope.calls.clear()
        plain, engine = both(*settings)
        torch.testing.assert_close(loss_of(engine), loss_of(plain))
        assert len(rope.calls) == 4
    # The kernel turns a part of each head; it has no factor, and not in all versions interleaved pairs.
    yarn = "model.rotary={scaling: yarn, factor: 4, original_length: 8}"
    cases = {"model.rotary.share=0.5": 4, "model.rotary.interleaved=true": 0, yarn: 0}
    for key, expected in cases.items():
        rope.calls.clear()
        plain, engine = both(key)
        torch.testing.assert_close(loss_of(engine), loss_of(plain))
        assert len(rope.calls) == expected, key
    both("model.position=learned")
    assert not tiny_gpt(tiny("model.position=learned")).model.config.apply_rope_fusion


def check_norms_of_apex() -> None:
    for norm in ("rmsnorm", "layernorm"):
        settings = ("model.backend=torch", f"model.norm={norm}", "moe.layers={at: [1], insert_after: [2]}")
        plain, fused = (tiny_gpt(tiny(*settings, f"model.norm_kernel={name}")) for name in ("torch", "apex"))
        assert [type(m).__name__.startswith("Fused") for m in fused.modules()].count(True) == 6
        assert list(plain.state_dict()) == list(fused.state_dict())
        torch.testing.assert_close(loss_of(fused), loss_of(plain))


def check_each_weight_has_a_product_of_its_own() -> None:
    _, engine = both("moe.expert_sublayers=2")
    products = [module for module in engine.modules() if isinstance(module, EngineProduct)]
    assert len(products) == len({id(product) for product in products}) == 2 * 2 * 2


CHECKS = checks_of(globals()) | checks_of(vars(runs_on_fakes))


def main() -> None:
    pretend_cuda()
    launch.start(launch.find_world(), timeout_minutes=1)
    verdicts = run_checks(CHECKS)
    with suppress(Exception):
        launch.stop()
    print(verdicts)


if __name__ == "__main__":
    main()
