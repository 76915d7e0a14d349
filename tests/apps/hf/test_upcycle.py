"""Several dense folders as one MoE model: every tensor bit for bit, the function of equal ones, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe.apps.hf import command
from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.upcycle import upcycle
from megamoe.checkpoint.format.reader import WEIGHT, CheckpointReader
from megamoe.config import load_config
from tests.support.apps.hf_models import make, tokens
from tests.support.apps.hf_training import all_tensors

pytest.importorskip("transformers")
LAYER = "model.decoder.layers.1.mlp.layer."


def silent(line: str) -> None:
    """Reports nothing."""


def made(folder: Path, name: str, seed: int, **changes: Any) -> Path:
    model = make("llama", folder / name, 1, intermediate_size=40, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + seed / 8
    model.save_pretrained(folder / name)
    return folder / name


def test_ffns_are_the_experts_and_all_else_is_averaged(tmp_path: Path) -> None:
    folders = [made(tmp_path, name, seed) for seed, name in enumerate(("code", "law", "news"), start=1)]
    assert command.main(["upcycle", *map(str, folders), str(tmp_path / "run"), "--top-k", "2"]) == 0
    theirs = [all_tensors(folder) for folder in folders]
    with CheckpointReader(tmp_path / "run/checkpoints/step_00000000") as reader:
        found = {name.removeprefix(WEIGHT): reader.tensor(name) for name in reader.names(WEIGHT)}
    assert len({folder["model.norm.weight"].sum().item() for folder in theirs}) > 1
    for number, folder in enumerate(theirs):
        gate, up, down = (folder[f"model.layers.1.mlp.{each}_proj.weight"] for each in ("gate", "up", "down"))
        assert torch.equal(found[f"{LAYER}experts.up"][number], torch.cat((gate, up)))
        assert torch.equal(found[f"{LAYER}experts.down"][number], down)
    for ours, name in (
        ("model.embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("model.decoder.final_layernorm.weight", "model.norm.weight"),
        (
            "model.decoder.layers.1.self_attention.linear_proj.weight",
            "model.layers.1.self_attn.o_proj.weight",
        ),
    ):
        mean = torch.stack([folder[name].double() for folder in theirs]).sum(0) / 3
        assert torch.equal(found[ours], mean.float()), name
    routers = [tensor for name, tensor in found.items() if name.endswith("router.scorer.weight")]
    assert len(routers) > 1 and all(0.01 < router.std() < 0.03 for router in routers)
    assert not torch.equal(routers[0], routers[1])
    moe = load_config(tmp_path / "run/continue.yaml").moe
    assert (moe.num_experts, moe.expert_ffn_hidden_size, moe.router.selector.options.k) == (3, 40, 2)


def test_equal_models_are_the_dense_one_in_transformers_too(tmp_path: Path) -> None:
    import transformers

    dense = make("llama", tmp_path / "a", 1, intermediate_size=40)
    make("llama", tmp_path / "b", 1, intermediate_size=40)
    upcycle([tmp_path / "a", tmp_path / "b"], tmp_path / "run", report=silent)
    export_run(tmp_path / "run", tmp_path / "out", model_class="mixtral", report=silent)
    mixtral = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected_BSV, found_BSV = dense(tokens()).logits, mixtral.eval()(tokens()).logits
    assert expected_BSV.std() > 0.1
    assert (found_BSV - expected_BSV).abs().max() < 1e-5


def test_what_does_not_fit_together_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = made(tmp_path, "one", 1), made(tmp_path, "other", 2)
    make("llama", tmp_path / "wide", 1, intermediate_size=48)
    make("mixtral", tmp_path / "moe")
    words = made(tmp_path, "words", 3)
    (words / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 7}))
    cases = {
        "name two or more folders": [one],
        "model.ffn_hidden_size is 48, but 40 in": [one, tmp_path / "wide"],
        "it is an MoE model, expected a dense one": [tmp_path / "moe", tmp_path / "moe"],
        "the models must have one tokenizer": [one, words],
    }
    for expected, folders in cases.items():
        assert command.main(["upcycle", *map(str, folders), str(tmp_path / "run")]) == 2
        told = capsys.readouterr().err
        assert expected in told and told.count("\n") == 1, told
    assert command.main(["upcycle", str(one), str(other), str(tmp_path / "run"), "--top-k", "3"]) == 2
    assert "--top-k: found 3, expected 1 to 2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
