"""Multi-token prediction of folders as the hub has them: DeepSeek's formula, the way back, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.import_folder import import_folder
from megamoe.errors import UserError
from tests.apps.hf.test_classes import opened, same_files
from tests.support.apps.hf_models import both_of, change_config, make, tokens, write_tensors
from tests.support.apps.hf_training import all_tensors, saved_at
from tests.support.ranks.pool import Pool

pytest.importorskip("transformers")
KINDS = ("deepseek_v3", "glm4_moe")
LAST = "model.layers.1."  # the block of multi-token prediction of the folders here
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def hub_folder(kind: str, folder: Path, number: int = 0) -> tuple[Any, dict[str, Tensor]]:
    """A folder with a block after the last one; return transformers' model of one block more, and tensors.

    The first blocks of that model are the folder's blocks, its last one is the block of the prediction.
    """
    model = make(kind, folder, number, first_k_dense_replace=0, num_hidden_layers=2)
    found = all_tensors(folder)
    generator = torch.Generator().manual_seed(9)
    hidden = model.config.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        found[f"{LAST}{name}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=generator)
    found[f"{LAST}eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden, generator=generator)
    for name, main in COPIES.items():
        found[LAST + name] = found.get(main, found["model.embed_tokens.weight"]).clone()
    change_config(folder, num_hidden_layers=1, num_nextn_predict_layers=1)
    write_tensors(folder, found)
    return model, found


def silent(line: str) -> None:
    """Report nothing."""


def by_hand(model: Any, found: dict[str, Tensor], tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
    """The formula of DeepSeek-V3's paper (section 2.2), depth 1: cross entropy of token i + 2, [B, S - 1]."""

    def norm(hidden_BSH: Tensor, weight_H: Tensor) -> Tensor:
        mean_square = hidden_BSH.square().mean(-1, keepdim=True)
        return hidden_BSH * (mean_square + model.config.rms_norm_eps).rsqrt() * weight_H

    decoder = model.model
    place_1S = torch.arange(tokens_BS.shape[1])[None]
    embedded_BSH = functional.embedding(tokens_BS, found["model.embed_tokens.weight"])
    rotary = decoder.rotary_emb(embedded_BSH, place_1S)
    length = tokens_BS.shape[1]
    causal = torch.full((length, length), -torch.inf).triu(1)[None, None]

    def block(number: int, hidden_BSH: Tensor) -> Any:
        count = hidden_BSH.shape[1]
        return decoder.layers[number](
            hidden_BSH,
            attention_mask=causal[..., :count, :count],
            position_embeddings=tuple(each[:, :count] for each in rotary),
        )

    hidden_BSH = norm(block(0, embedded_BSH), found["model.norm.weight"])
    both_BSH = [
        norm(embedded_BSH[:, 1:], found[f"{LAST}enorm.weight"]),
        norm(hidden_BSH[:, :-1], found[f"{LAST}hnorm.weight"]),
    ]
    projected_BSH = torch.cat(both_BSH, dim=-1) @ found[f"{LAST}eh_proj.weight"].T
    state_BSH = norm(block(1, projected_BSH), found[f"{LAST}shared_head.norm.weight"])
    logits_BSV = state_BSH @ found[f"{LAST}shared_head.head.weight"].T
    return functional.cross_entropy(logits_BSV.transpose(1, 2), labels_BS[:, 1:], reduction="none")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("kind", "number"), both_of(KINDS))
@torch.no_grad()
def test_losses_are_those_of_the_formula_and_the_way_back_gives_the_same_files(
    kind: str, number: int, tmp_path: Path
) -> None:
    model, found = hub_folder(kind, tmp_path / "hf", number)
    import_folder(tmp_path / "hf", tmp_path / "run", further=True, report=silent)
    ours = opened(tmp_path / "run").decoder
    tokens_BS, labels_BS = tokens(), tokens().roll(-1, 1)
    position_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    ours(tokens_BS, position_BS, labels_BS)
    losses_DBS = ours.take_multi_token_losses()
    expected_BS = by_hand(model, found, tokens_BS, labels_BS)
    assert expected_BS.std() > 0.1
    assert (losses_DBS[0, :, :-1] - expected_BS).abs().max() < 1e-5
    export_run(tmp_path / "run", tmp_path / "back", report=silent)
    back = all_tensors(tmp_path / "back")
    assert back.keys() == found.keys()
    assert all(torch.equal(back[name], found[name]) for name in found)
    content = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back")]
    assert content[0].items() <= content[1].items() or content[1].items() <= content[0].items()


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_gives_the_same_files(kind: str, pool: Pool, tmp_path: Path) -> None:
    hub_folder(kind, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run", further=True, report=silent)
    export_run(tmp_path / "run", tmp_path / "back", report=silent)
    overrides = ["parallel.tensor=2", "parallel.expert=2"]
    pool.run(saved_at, tmp_path / "run", tmp_path, "saved", overrides, ranks=4, timeout_s=600)
    export_run(tmp_path / "saved", tmp_path / "again", report=silent)
    same_files(tmp_path / "back", tmp_path / "again")


def test_without_the_option_the_block_is_left_out_by_name(tmp_path: Path) -> None:
    hub_folder("glm4_moe", tmp_path / "hf")
    lines: list[str] = []
    import_folder(tmp_path / "hf", tmp_path / "run", report=lines.append)
    (line,) = [line for line in lines if "left out" in line]
    assert f"--multi-token-prediction: 46 tensors, the first of them {LAST}eh_proj.weight" in line, line
    export_run(tmp_path / "run", tmp_path / "back", report=silent)
    assert not any(name.startswith(LAST) for name in all_tensors(tmp_path / "back"))


def test_tensors_of_ernies_prediction_are_left_out(tmp_path: Path) -> None:
    make("ernie4_5_moe", tmp_path / "hf")
    further = {f"model.mtp_{name}.0.weight": torch.ones(32) for name in ("block", "emb_norm", "hidden_norm")}
    found = all_tensors(tmp_path / "hf")
    write_tensors(tmp_path / "hf", found | further)
    change_config(tmp_path / "hf", num_nextn_predict_layers=1)
    lines: list[str] = []
    import_folder(tmp_path / "hf", tmp_path / "run", report=lines.append)
    (line,) = [line for line in lines if "left out" in line]
    assert line == (
        "left out for Ernie4_5_MoeForCausalLM has no multi-token prediction here: 3 tensors, the first of "
        "them model.mtp_block.0.weight"
    )
    export_run(tmp_path / "run", tmp_path / "back", report=silent)
    assert all_tensors(tmp_path / "back").keys() == found.keys()


def changed(found: dict[str, Tensor], name: str) -> None:
    found[LAST + name] = found[LAST + name] + 1


CASES: dict[str, tuple[Any, str]] = {
    "another embedding": (
        lambda found: changed(found, "embed_tokens.weight"),
        f"{LAST}embed_tokens.weight is not model.embed_tokens.weight, of which it must be a copy",
    ),
    "another head": (
        lambda found: changed(found, "shared_head.head.weight"),
        f"{LAST}shared_head.head.weight is not lm_head.weight, of which it must be a copy",
    ),
    "missing": (lambda found: found.pop(f"{LAST}hnorm.weight"), f"{LAST}hnorm.weight is missing"),
    "extra": (
        lambda found: found.update({"model.layers.2.enorm.weight": torch.ones(32)}),
        "model.layers.2.enorm.weight has no place in Glm4MoeForCausalLM",
    ),
}


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    hub_folder("glm4_moe", tmp_path / "hf")
    for change, words in CASES.values():
        before = load_file(tmp_path / "hf/model.safetensors")
        found = dict(before)
        change(found)
        write_tensors(tmp_path / "hf", found)
        with pytest.raises(UserError, match=words):
            import_folder(tmp_path / "hf", tmp_path / "run", further=True)
        write_tensors(tmp_path / "hf", before)
    make("mixtral", tmp_path / "other")
    with pytest.raises(UserError, match="MixtralForCausalLM has no multi-token prediction here; leave out"):
        import_folder(tmp_path / "other", tmp_path / "run", further=True)
    assert not (tmp_path / "run").exists()
