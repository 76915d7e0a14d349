"""Weights of a checkpoint in a new model: the same bits, a dense FFN cut or copied, and what is refused."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megamoe.checkpoint.init_from import InitialWeights
from megamoe.config import RunConfig
from megamoe.config.schema import InitConfig
from megamoe.model.architectures.decoder import GPT
from megamoe.moe.layer import MoELayer
from megamoe.parallel.layout import Layout
from tests.support.checkpoint_files import flip, grid, rewrite, write_checkpoint
from tests.support.refusals import Case, cases, told
from tests.support.tiny import VOCABULARY, tiny, tiny_gpt

pytestmark = pytest.mark.usefixtures("one_rank")

DENSE = ("moe.layers=none",)
CUT = ("moe.expert_ffn_hidden_size=8", "moe.num_experts=3", "moe.router.selector={k: 3, weights: one}")
COPY = ("moe.expert_ffn_hidden_size=24",)
MLP = "model.decoder.layers.1.mlp"


def save(folder: Path, config: RunConfig, *counts: int) -> GPT:
    """The model of `config` with weights of its own, and its checkpoint: each tensor in so many chunks."""
    model = tiny_gpt(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    state = {f"model/{name}": tensor for name, tensor in tensors(model).items()}
    chunks = {name: grid(tuple(tensor.shape), *counts) for name, tensor in state.items()}
    cuts = {name: {"expert": True} if ".experts." in name else {} for name, _ in model.named_parameters()}
    # An optimiser's share, which no model has a place for, is left behind.
    moments = {name.replace("model/", "exp_avg/"): torch.ones_like(tensor) for name, tensor in state.items()}
    write_checkpoint(folder, state | moments, chunks=chunks, shardings=cuts)
    return model


def load(model: nn.Module, folder: Path, experts: str) -> list[str]:
    is_moe = any(isinstance(module, MoELayer) for module in model.modules())
    init = InitConfig(path=str(folder), experts=experts)  # type: ignore[arg-type]
    weights = InitialWeights(init, is_moe, Layout(1), 0)
    weights.fill("", model)
    weights.finish()
    return weights.kept


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items() if torch.is_tensor(t)}


def losses(model: GPT) -> Tensor:
    tokens_BS = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
    position_BS = torch.arange(12).repeat(2, 1)
    with torch.no_grad():
        return model.eval()(tokens_BS, position_BS, tokens_BS.roll(-1, 1))


@pytest.mark.parametrize("counts", [(), (2,), (4, 3), (2, 5, 3)], ids=str)
def test_the_same_model_is_bit_equal_whatever_its_chunks_are(tmp_path: Path, counts: tuple[int, ...]) -> None:
    config = tiny("moe.num_shared_experts=1", "moe.router.score_function={name: sigmoid, bias_update: 0.1}")
    expected = tensors(save(tmp_path / "step", config, *counts))
    assert len(list((tmp_path / "step").glob("shard_*"))) == math.prod(counts)
    model = tiny_gpt(config)
    assert not torch.equal(tensors(model)[f"{MLP}.layer.experts.up"], expected[f"{MLP}.layer.experts.up"])
    assert load(model, tmp_path / "step", "same") == []
    found = tensors(model)
    assert found.keys() == expected.keys() and any(name.endswith("score_function.bias") for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_bf16_weights_and_scalars_come_through(tmp_path: Path) -> None:
    """A scalar has no slice; weights saved in bf16 initialise an fp32 model unchanged."""
    model = nn.Linear(3, 2)
    model.scale = nn.Parameter(torch.tensor(0.0))
    weight = torch.randn(2, 3).bfloat16()
    saved = {"model/weight": weight, "model/bias": torch.ones(2), "model/scale": torch.tensor(0.3)}
    write_checkpoint(tmp_path / "step", saved, chunks={"model/weight": grid((2, 3), 1, 2)})
    load(model, tmp_path / "step", "same")
    assert torch.equal(model.weight, weight.float()) and model.weight.dtype == torch.float32
    assert model.scale.item() == pytest.approx(0.3)


@pytest.mark.parametrize("activation", ["swiglu", "gelu", "geglu", "relu"])
def test_a_dense_model_cut_into_experts_is_the_same_function(tmp_path: Path, activation: str) -> None:
    """Every expert chosen with weight 1; and each expert against a slice worked out by hand."""
    own = f"model.activation={activation}"
    dense = save(tmp_path / "step", tiny(*DENSE, own), 5, 3)
    model = tiny_gpt(tiny(*CUT, own))
    kept = load(model, tmp_path / "step", "cut")
    assert kept == ["router.scorer.weight"]
    torch.testing.assert_close(losses(model), losses(dense), rtol=1e-6, atol=1e-6)
    state, experts = dense.state_dict(), model.state_dict()
    up, down = state[f"{MLP}.linear_fc1.weight"], state[f"{MLP}.linear_fc2.weight"]
    last = torch.cat([up[16:24], up[40:48]]) if activation.endswith("glu") else up[16:24]
    assert torch.equal(experts[f"{MLP}.layer.experts.up"][2], last)
    assert torch.equal(experts[f"{MLP}.layer.experts.down"][2], down[:, 16:24])


def test_the_cut_is_exact_beyond_fp32(tmp_path: Path) -> None:
    """The plain formula of both sides in fp64: rounding aside, nothing is left over."""
    dense = save(tmp_path / "step", tiny(*DENSE)).state_dict()
    model = tiny_gpt(tiny(*CUT))
    load(model, tmp_path / "step", "cut")
    rows = torch.randn(5, 16, dtype=torch.float64)

    def ffn(up: Tensor, down: Tensor) -> Tensor:
        gate, value = (rows @ up.double().T).chunk(2, dim=-1)
        return (functional.silu(gate) * value) @ down.double().T

    experts = model.model.decoder.layers[1].mlp.layer.experts
    parts = sum(ffn(up, down) for up, down in zip(experts.up, experts.down, strict=True))
    whole = ffn(dense[f"{MLP}.linear_fc1.weight"], dense[f"{MLP}.linear_fc2.weight"])
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_upcycled_experts_are_copies_and_the_same_function(tmp_path: Path) -> None:
    """The default weights of top-k sum to 1."""
    dense = save(tmp_path / "step", tiny(*DENSE))
    model = tiny_gpt(tiny(*COPY))
    load(model, tmp_path / "step", "copy")
    up = model.state_dict()[f"{MLP}.layer.experts.up"]
    assert len(up) == 4
    assert all(torch.equal(expert, dense.state_dict()[f"{MLP}.linear_fc1.weight"]) for expert in up)
    torch.testing.assert_close(losses(model), losses(dense), rtol=1e-5, atol=1e-5)


def test_what_a_dense_model_lacks_keeps_its_start(tmp_path: Path) -> None:
    """Shared experts too; a block that stays dense takes the dense FFN."""
    own = ("moe.layers={at: [2]}", "moe.num_shared_experts=1", *COPY)
    dense = save(tmp_path / "step", tiny(*DENSE)).state_dict()
    model = tiny_gpt(tiny(*own))
    before = tensors(model)
    kept = load(model, tmp_path / "step", "copy")
    assert sorted(kept) == ["router.scorer.weight", "shared.down", "shared.up"]
    after = tensors(model)
    assert all(torch.equal(after[f"{MLP}.layer.{name}"], before[f"{MLP}.layer.{name}"]) for name in kept)
    assert all(torch.equal(after[name], dense[name]) for name in after if ".mlp.layer." not in name)


SHARD = "shard_00001.safetensors"
# What happens to the checkpoint's folder.
HARMS: dict[str, Callable[[Path], object]] = {
    "no summary": lambda folder: (folder / "checkpoint.json").unlink(),
    "no shard": lambda folder: (folder / SHARD).unlink(),
    "a flipped bit": lambda folder: flip(folder / SHARD),
    "no norm": lambda folder: without(folder, "model.decoder.final_layernorm.weight"),
    "no experts": lambda folder: without(folder, f"{MLP}.layer.experts.up"),
    "no FFN": lambda folder: without(folder, f"{MLP}.linear_fc2.weight"),
    "another tensor": lambda folder: rewrite(
        folder, lambda held: held.update({"model/other": torch.ones(1)})
    ),
}


def without(folder: Path, name: str) -> None:
    rewrite(folder, lambda held: held.pop(f"model/{name}"))


@pytest.mark.parametrize("case", cases("initial_weights"))
def test_refused_in_one_line(tmp_path: Path, case: Case, expect_message: Callable[..., None]) -> None:
    """saved, run: of the checkpoint's model and of this run's."""
    row = case.row
    save(tmp_path / "step", tiny(*row.get("saved", ())), 2)
    HARMS.get(row.get("harm", ""), lambda folder: None)(tmp_path / "step")
    model = tiny_gpt(tiny(*row.get("run", ())))
    message = told(lambda: load(model, tmp_path / "step", row.get("experts", "same")), tmp_path)
    expect_message(case, message)
