"""Every class: import, the same function as transformers', and export of the same files."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megamoe.apps.evaluation.trained_model import Session
from megamoe.apps.generation.generate import generate
from megamoe.apps.generation.sampling import Sampling
from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.families import FAMILIES
from megamoe.apps.hf.import_folder import import_folder
from megamoe.data.tokenizers import ByteTokenizer
from megamoe.data.vocabulary import Vocabulary
from megamoe.parallel.launch import find_world
from tests.support.apps.hf_models import CONFIGS, WORDS, both_of, change_config, make, tokens

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_rank")
CASES = both_of(CONFIGS)
NEW = 64  # tokens
QUICK = ("llama-0", "mixtral-0", "granitemoeshared-0")  # of the tests of generation


def opened(run: Path, *overrides: str) -> Any:
    """The imported model, in the world of one rank that the fixture has started."""
    return Session(find_world(), overrides, _is_started=True).open(run)


def without_version(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    config.pop("transformers_version", None)
    return dict(config)


def same_files(one: Path, other: Path) -> None:
    """Every tensor file has the same bytes, and config.json the same keys and values; the first may lack keys
    that other programs read.
    """
    names = sorted(path.name for path in one.glob("*.safetensors"))
    assert names == sorted(path.name for path in other.glob("*.safetensors"))
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    assert without_version(one).items() <= without_version(other).items()


@pytest.mark.parametrize(("kind", "number"), CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers_and_the_way_back_gives_the_same_files(
    kind: str, number: int, tmp_path: Path
) -> None:
    theirs = make(kind, tmp_path / "hf", number)
    import_folder(tmp_path / "hf", tmp_path / "run", report=lambda line: None)
    ours = opened(tmp_path / "run")
    tokens_BS = tokens()
    position_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    logits_BSV = ours.decoder.whole_logits(tokens_BS, position_BS)
    expected_BSV = theirs(tokens_BS).logits
    assert expected_BSV.std() > 0.1
    assert (logits_BSV - expected_BSV).abs().max() < 1e-5
    export_run(tmp_path / "run", tmp_path / "back", report=lambda line: None)
    same_files(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        pytest.param(*case.values, id=case.id, marks=[] if case.id in QUICK else [pytest.mark.full])
        for case in CASES
    ],
)
@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(kind: str, number: int, tmp_path: Path) -> None:
    theirs = make(kind, tmp_path / "hf", number)
    import_folder(tmp_path / "hf", tmp_path / "run", report=lambda line: None)
    prompts = [[5, 7, 11, 2], [40], [3, 9, 27, 33, 3, 9, 27, 33, 1]]
    expected = [their_tokens(theirs, prompt) for prompt in prompts]
    assert len({token for each in expected for token in each}) > 3, "they repeat themselves"
    end = expected[0][NEW // 2]
    ended = [their_tokens(theirs, prompt, end) for prompt in prompts]
    assert len(ended[0]) < NEW
    sampling = Sampling(max_tokens=NEW, temperature=0.0)
    trained = opened(tmp_path / "run")
    ours = dataclasses.replace(trained, vocabulary=Vocabulary(WORDS, None, ByteTokenizer()))
    found = generate(ours, prompts, sampling, batch_size=3)
    assert [result.tokens for result in found] == expected
    ours = dataclasses.replace(trained, vocabulary=Vocabulary(WORDS, end, ByteTokenizer()))
    found = generate(ours, prompts, sampling, batch_size=3)
    assert [result.tokens for result in found] == ended


@pytest.mark.full
@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_in_bf16_logits_are_as_near_as_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Both are compared with transformers' logits from the same rounded weights in fp32."""
    theirs = make(kind, tmp_path / "fp32").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run", report=lambda line: None)
    ours = opened(tmp_path / "run")
    assert ours.precision == "bf16"
    tokens_BS = tokens()
    position_BS = torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS)
    logits = ours.decoder.whole_logits(tokens_BS, position_BS).float(), theirs(tokens_BS).logits.float()
    exact = theirs.float()(tokens_BS).logits
    mine, others = (float((found - exact).square().mean().sqrt() / exact.std()) for found in logits)
    assert 0 < mine < 1.5 * others < 0.3


def their_tokens(model: Any, prompt: list[int], end: int | None = None) -> list[int]:
    """The greedy continuation by transformers."""
    tokens_BS = torch.tensor([prompt])
    found_BS: Tensor = model.generate(
        tokens_BS,
        attention_mask=torch.ones_like(tokens_BS),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=end,
    )
    new: list[int] = found_BS[0, len(prompt) :].tolist()
    return new


def test_every_class_has_its_models_and_its_line_on_the_page() -> None:
    assert CONFIGS.keys() == FAMILIES.keys()
    page = (Path(__file__).parents[3] / "docs/models/hugging_face.md").read_text(encoding="utf-8")
    assert {*re.findall(r"^\| `(\w+)` \|", page, re.M)} >= FAMILIES.keys()


def test_special_tokens_of_an_imported_model_come_back(tmp_path: Path) -> None:
    """Of config.json and of generation_config.json, lists of them too."""
    make("mixtral", tmp_path / "hf")
    ids = {"bos_token_id": 3, "eos_token_id": [5, 7], "pad_token_id": 9}
    change_config(tmp_path / "hf", **ids)
    generation = {**ids, "decoder_start_token_id": 11, "max_new_tokens": 4, "do_sample": False}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(generation))
    import_folder(tmp_path / "hf", tmp_path / "run", report=lambda line: None)
    export_run(tmp_path / "run", tmp_path / "back", report=lambda line: None)
    for name, expected in (("config.json", ids), ("generation_config.json", generation)):
        found = json.loads((tmp_path / "back" / name).read_text())
        assert {key: found.get(key) for key in expected} == expected, name


@torch.no_grad()
def test_one_expert_with_weight_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exact in evaluation and export; to train it the router is frozen, for it gets no gradient."""
    theirs = make("mixtral", tmp_path / "hf", num_experts_per_tok=1)
    import_folder(tmp_path / "hf", tmp_path / "run")
    assert "moe.frozen: [router]" in capsys.readouterr().out
    ours = opened(tmp_path / "run")
    position_BS = torch.arange(tokens().shape[1]).expand_as(tokens())
    assert (ours.decoder.whole_logits(tokens(), position_BS) - theirs(tokens()).logits).abs().max() < 1e-5
    export_run(tmp_path / "run", tmp_path / "back", report=lambda line: None)
    same_files(tmp_path / "hf", tmp_path / "back")
