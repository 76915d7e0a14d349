"""Models that were trained here and never imported: transformers opens the export and computes the same."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megamoe.apps.hf.export_run import _configuration, export_run
from megamoe.apps.hf.family import differences
from megamoe.apps.hf.folder import special_ids, tokenizer_files
from megamoe.apps.prepare.new_tokenizers import train_sentencepiece
from megamoe.apps.prepare.prepare import Preparation, prepare
from megamoe.config import load_config, parse_config, to_dict
from megamoe.errors import UserError
from megamoe.model.architectures.decoder import GPT
from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.support.apps.hf_models import WORDS, tokens
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import small_run

transformers = pytest.importorskip("transformers")
PADDED = 64  # 48 words in multiples of 64
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("LlamaForCausalLM", {"moe__layers": "none"}),
    "MoE": (
        "MixtralForCausalLM",
        {"moe__layers": {"every": 1}, "moe__num_shared_experts": 0, "model__tie_embeddings": False},
    ),
    "shared experts": (
        "Qwen2MoeForCausalLM",
        {"moe__shared_expert_mode": "gated", "model__attention": {"input_bias": True}},
    ),
    "head norms": (
        "Qwen3MoeForCausalLM",
        {"moe__num_shared_experts": 0, "model__attention": {"query_key_norm": "head"}},
    ),
    "DeepSeek's router": (
        "Glm4MoeForCausalLM",
        {
            "model__multi_token_prediction": {"depth": 1},
            "moe__router": {"preset": "deepseek_v3", "masks": "none", "selector": {"k": 2, "name": "top_k"}},
        },
    ),
}
LIMITED = "moe.router.masks=[{name: group_limit, num_groups: 4, keep: 2}]"
BIASED = "moe.router.score_function={name: softmax, bias_update: 0.001%s}"


def trained(folder: Path, changes: dict[str, Any]) -> torch.Tensor:
    """Job: train two steps and save; return logits."""
    config = small_run(folder, **{"moe__losses": {}, "model__vocab_size": WORDS, **changes})
    trainer = Trainer(config)
    try:
        trainer.step()
        trainer.step()
        trainer.save()
        model = trainer.model.eval()
        assert isinstance(model, GPT)
        tokens_BS = tokens(length=24)
        with torch.no_grad():
            logits: torch.Tensor = model.whole_logits(tokens_BS, torch.arange(24).expand_as(tokens_BS))
    finally:
        trainer.close()
        launch.stop()
    return logits


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_logits_of_the_run(case: str, pool: Pool, tmp_path: Path) -> None:
    expected, changes = CASES[case]
    (logits_BSV,) = pool.run(trained, tmp_path, changes, ranks=1)
    export_run(tmp_path / "small", tmp_path / "hf", report=lambda line: None)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert type(model).__name__ == expected
    with torch.no_grad():
        found_BSV = model(tokens(length=24)).logits
    assert found_BSV.shape[-1] == PADDED and found_BSV.std() > 0.05
    assert (found_BSV - logits_BSV).abs().max() < 1e-5
    content = json.loads((tmp_path / "hf/config.json").read_text())
    assert content["vocab_size"] == PADDED and content["max_position_embeddings"] == 32
    small = tmp_path / "bf16"
    export_run(tmp_path / "small", small, dtype="bf16", shard_bytes=20_000, report=lambda line: None)
    assert len(list(small.glob("model-*-of-*.safetensors"))) > 1
    halved = transformers.AutoModelForCausalLM.from_pretrained(small)
    assert halved.dtype == torch.bfloat16
    for (name, one), other in zip(model.named_parameters(), halved.parameters(), strict=True):
        assert torch.equal(one.to(torch.bfloat16), other), name


def test_the_tokenizer_of_the_data_goes_along(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "river": 1, "sea": 2}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<|endoftext|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    found = tokenizer_files(parse_config({"data": {"tokenizer": str(tmp_path / "tokenizer.json")}}))
    for name, content in found.items():
        (tmp_path / "hf" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "hf" / name).write_bytes(content)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.eos_token == "<|endoftext|>" and tokenizer.eos_token_id == 3
    assert tokenizer("river sea")["input_ids"] == [1, 2]
    assert tokenizer.model_max_length == parse_config({}).data.sequence_length
    assert tokenizer_files(parse_config({"data": {"tokenizer": str(tmp_path / "hf")}})) == found
    assert tokenizer_files(parse_config({"data": {"tokenizer": "bytes"}})) == {}
    assert tokenizer_files(parse_config({"data": {"mock": True}})) == {}


def test_a_sentencepiece_model_goes_along(tmp_path: Path) -> None:
    train_sentencepiece(["The river runs to the sea."] * 50, 300, tmp_path / "own.model")
    found = tokenizer_files(parse_config({"data": {"tokenizer": str(tmp_path / "own.model")}}))
    assert found["tokenizer.model"] == (tmp_path / "own.model").read_bytes()
    assert json.loads(found["tokenizer_config.json"])["eos_token"] == "</s>"


def test_special_ids_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Not those of Mixtral's first model, which transformers takes where config.json has none."""
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    assert special_ids(parse_config({"data": {"mock": True}})) == none
    assert special_ids(parse_config({"data": {"tokenizer": "bytes"}})) == none | {"eos_token_id": 256}
    (tmp_path / "text.txt").write_text("river sea\n")
    source, output = str(tmp_path / "text.txt"), str(tmp_path / "text")
    prepare(Preparation(output, [source], special="pad"))
    card = special_ids(parse_config({"data": {"sources": [str(tmp_path / "text")]}}))
    assert card == none | {"eos_token_id": 256, "pad_token_id": 257}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([], ["moe.weights_in_activation=true"], set()),
        ([], ["moe.router.scorer.rows=true"], set()),
        ([BIASED % ""], [BIASED % ", mean_experts: 1.5"], set()),
        ([], ["moe.router.score_function.over=all"], set()),
        ([LIMITED], [LIMITED, "moe.router.score_function.over=all"], {"moe.router.score_function.over"}),
    ],
)
def test_what_does_not_change_the_function_stands_in_no_way(
    one: list[str], other: list[str], expected: set[str]
) -> None:
    configs = [load_config(None, ["moe.layers.every=1", *changes]) for changes in (one, other)]
    assert differences(*configs).keys() == expected


def test_parts_of_plugins() -> None:
    """A loss is left out with its plugin; a part of the router is refused, unless an override replaces it."""
    config = to_dict(
        parse_config({"moe": {"losses": {"z_loss": 0.1}, "groups": [{"layers": [2], "num_experts": 8}]}})
    )
    layers = config["moe"], config["moe"]["groups"][0]
    for layer in layers:
        layer["losses"]["own"] = {"name": "my_loss", "weight": 0.1, "of_mine": 3}
    reader: Any = SimpleNamespace(meta={"config": config}, path="run")
    found = _configuration(reader, []).moe
    assert [*found.losses] == [*found.groups[0].losses] == ["z_loss"]
    assert "own" in layers[0]["losses"]  # what the checkpoint holds stays
    layers[0]["router"]["scorer"] = {"name": "position_bias"}
    with pytest.raises(UserError, match="^run: moe.router.scorer.*position_bias"):
        _configuration(reader, [])
    assert _configuration(reader, ["moe.router.scorer=linear"]).moe.router.scorer.name == "linear"


@pytest.mark.parametrize("model_class", [None, "custom"])
def test_generation_stops_at_the_end_of_document(model_class: str | None, pool: Pool, tmp_path: Path) -> None:
    """The export's own ids; the logits prefer the end from the third token on."""
    changes = {"moe__num_shared_experts": 0, "model__tie_embeddings": False, "data__tokenizer": "bytes"}
    pool.run(trained, tmp_path, {**changes, "moe__layers": {"every": 1}, "model__vocab_size": 257}, ranks=1)
    export_run(tmp_path / "small", tmp_path / "hf", model_class=model_class, report=lambda line: None)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / "hf" / name).read_text())
        assert [content[f"{key}_token_id"] for key in ("bos", "eos", "pad")] == [None, 256, None], name
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    assert model.generation_config.eos_token_id == 256

    def prefer(module: Any, inputs: Any, output: Any) -> None:
        output.logits[..., [2, 256]] = torch.tensor([1e4, 2e4 * (len(written) > 1)])
        written.append(2)

    written: list[int] = []
    model.register_forward_hook(prefer)
    text = model.generate(torch.tensor([[5, 6]]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert text.tolist() == [[5, 6, 2, 2, 256]]
