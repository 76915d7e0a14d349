"""Imported models train as in transformers, and leave each layout as the same files; upcycling."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.import_folder import import_folder
from tests.apps.hf.test_classes import same_files
from tests.support.apps.hf_models import CONFIGS, make, tokens
from tests.support.apps.hf_training import all_tensors, saved_at, trained_beside_transformers
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import CUT_ALL, ds_config, ds_variant

pytest.importorskip("transformers")


@pytest.mark.full
@pytest.mark.parametrize(("kind", "number"), [(kind, number) for kind in CONFIGS for number in (0, 1)])
def test_gradients_and_three_steps_are_those_of_transformers(
    kind: str, number: int, pool: Pool, tmp_path: Path
) -> None:
    (found,) = pool.run(trained_beside_transformers, kind, number, tmp_path, ranks=1, timeout_s=600)
    assert found["gradient"] < 1e-5
    assert found["change"] > 3e-3
    assert found["weights"] < 1e-4


LAYOUTS = {
    "EP 2": (2, ["parallel.expert=2"]),
    "TP 2": (2, ["parallel.tensor=2"]),
    "EP 4": (4, ["parallel.expert=4"]),
    "TP 2 x EP 2": (4, ["parallel.tensor=2", "parallel.expert=2"]),
    "EP 2 x ETP 2": (4, ["parallel.expert=2", "parallel.expert_tensor=2"]),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", CONFIGS)
def test_ten_layouts_give_the_same_files(kind: str, pool: Pool, tmp_path: Path) -> None:
    make(kind, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run", report=lambda line: None)
    zero3 = ds_variant(tmp_path, "zero3_fp32", zero_optimization=CUT_ALL)
    layouts = {
        **LAYOUTS,
        "ZeRO 1": (2, [f"parallel.deepspeed={ds_config('zero1_fp32')}"]),
        "ZeRO 1, TP 2": (4, ["parallel.tensor=2", f"parallel.deepspeed={ds_config('zero1_fp32')}"]),
        "ZeRO 2, EP 2": (2, ["parallel.expert=2", f"parallel.deepspeed={ds_config('zero2_fp32')}"]),
        "ZeRO 3": (2, [f"parallel.deepspeed={zero3}"]),
        "ZeRO 3, TP 2 x EP 2": (4, ["parallel.tensor=2", "parallel.expert=2", f"parallel.deepspeed={zero3}"]),
    }
    if "num_experts" not in (tmp_path / "run/continue.yaml").read_text():
        layouts = {name: it for name, it in layouts.items() if "EP" not in name}
    for number, (ranks, overrides) in enumerate(layouts.values()):
        pool.run(
            saved_at, tmp_path / "run", tmp_path, f"saved{number}", overrides, ranks=ranks, timeout_s=600
        )
        export_run(tmp_path / f"saved{number}", tmp_path / f"back{number}", report=lambda line: None)
        same_files(tmp_path / "hf", tmp_path / f"back{number}")


SIZE = 24
COPY = [
    "moe.layers.every=1",
    "moe.num_experts=4",
    f"moe.expert_ffn_hidden_size={SIZE}",
    "moe.router.selector.k=2",
    "checkpoint.init.experts=copy",
]
NOISE = "checkpoint.init.noise=0.1"


def imported(folder: Path) -> Any:
    """A dense Llama, which is returned, and its import."""
    theirs = make("llama", folder / "hf", 1, intermediate_size=SIZE)
    import_folder(folder / "hf", folder / "run", report=lambda line: None)
    return theirs


def upcycled(folder: Path, pool: Pool, name: str, *overrides: str, ranks: int = 1) -> dict[str, Tensor]:
    """Every tensor of the Mixtral that the dense model becomes, by transformers' names; also in a folder."""
    pool.run(saved_at, folder / "run", folder, name, [*COPY, *overrides], ranks=ranks, timeout_s=600)
    export_run(folder / name, folder / f"{name}_hf", model_class="mixtral", report=lambda line: None)
    return all_tensors(folder / f"{name}_hf")


def experts_of(found: dict[str, Tensor], matrix: str) -> Tensor:
    return torch.stack(
        [found[f"model.layers.1.block_sparse_moe.experts.{expert}.{matrix}.weight"] for expert in range(4)]
    )


def test_copies_are_the_dense_model_in_transformers_too(pool: Pool, tmp_path: Path) -> None:
    import transformers

    dense = imported(tmp_path)
    upcycled(tmp_path, pool, "moe")
    mixtral = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe_hf", dtype=torch.float32)
    assert type(mixtral).__name__ == "MixtralForCausalLM"
    with torch.no_grad():
        expected_BSV, found_BSV = dense(tokens()).logits, mixtral.eval()(tokens()).logits
    assert expected_BSV.std() > 0.1
    assert (found_BSV - expected_BSV).abs().max() < 1e-5


@pytest.mark.full
def test_noise_has_the_size_that_was_asked_for_at_every_layout(pool: Pool, tmp_path: Path) -> None:
    imported(tmp_path)
    plain, noisy = upcycled(tmp_path, pool, "plain"), upcycled(tmp_path, pool, "noisy", NOISE)
    dense = all_tensors(tmp_path / "hf")
    gate_up = torch.cat([dense[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    for matrix, std in (
        ("w1", gate_up.std()),
        ("w3", gate_up.std()),
        ("w2", dense["model.layers.1.mlp.down_proj.weight"].std()),
    ):
        noise_EFH = (experts_of(noisy, matrix) - experts_of(plain, matrix)) / (0.1 * std)
        assert abs(float(noise_EFH.std()) - 1) < 0.05 and abs(float(noise_EFH.mean())) < 0.05
        drawn = torch.corrcoef(noise_EFH.flatten(1))
        assert (drawn - torch.eye(4)).abs().max() < 0.15, "experts share their noise"
    routers = [name for name in plain if name.endswith("gate.weight")]
    assert routers and all(torch.equal(plain[name], noisy[name]) for name in routers)
    layouts = {
        "ep": (2, ["parallel.expert=2"]),
        "etp": (4, ["parallel.expert=2", "parallel.expert_tensor=2"]),
        "tp": (2, ["parallel.tensor=2"]),
    }
    for name, (ranks, overrides) in layouts.items():
        upcycled(tmp_path, pool, name, NOISE, *overrides, ranks=ranks)
        same_files(tmp_path / "noisy_hf", tmp_path / f"{name}_hf")
