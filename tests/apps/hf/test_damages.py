"""Folders that cannot be converted: one line that names what is wrong, exit code 2, nothing half-written."""

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megamoe.apps.hf.import_folder import import_folder
from tests.support.apps.hf_models import change_config, make, write_tensors
from tests.support.refusals import Case, cases
from tests.support.tiny import tool

pytest.importorskip("transformers")
FIRST = "model.layers.0.block_sparse_moe."
Change = Callable[[Path], None]
Refused = Callable[..., str]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral") / "hf"
    make("mixtral", folder)
    return folder


@pytest.fixture
def run(mixtral: Path, tmp_path: Path) -> Path:
    """The imported model."""
    assert tool("convert_hf").main(["import", str(mixtral), str(tmp_path / "run")]) == 0
    return tmp_path / "run"


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Change:
    def apply(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        write_tensors(folder, found)

    return apply


def renamed(found: dict[str, Tensor]) -> None:
    found[f"{FIRST}experts.9.w1.weight"] = found.pop(f"{FIRST}experts.3.w1.weight")


def put(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Change one tensor."""
    return tensors(lambda found: found.update({name: change(found[name])}))


def content(change: Callable[[bytes], bytes]) -> Change:
    """Change the bytes of the tensor file."""

    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return apply


def index(change: Callable[[list[str]], dict[str, str]]) -> Change:
    """Write an index of what `change` makes of the tensors' names."""

    def apply(folder: Path) -> None:
        written = {"weight_map": change(sorted(load_file(folder / "model.safetensors")))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(written))

    return apply


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


FILE, NORM = "model.safetensors", "model.norm.weight"
CASES: dict[str, tuple[Change, list[str]]] = {
    "cut short": (content(lambda old: old[:-1000]), [FILE, "missing or damaged"]),
    "header": (content(lambda old: struct.pack("<Q", 1 << 40) + old[8:]), [FILE, "missing or damaged"]),
    "renamed": (tensors(renamed), [f"{FIRST}experts.3.w1.weight is missing"]),
    "missing": (tensors(lambda t: t.pop(NORM)), [f"{NORM} is missing"]),
    "extra": (
        tensors(lambda t: t.update(extra=torch.zeros(2))),
        ["extra has no place in MixtralForCausalLM"],
    ),
    "shape": (
        put(f"{FIRST}gate.weight", lambda gate: gate.T.contiguous()),
        [f"{FIRST}gate.weight has shape [32, 4]", "[4, 32]"],
    ),
    "dtype": (put(NORM, lambda norm: norm.to(torch.int32)), [f"{NORM} is int32"]),
    "two dtypes": (put(f"{FIRST}experts.1.w1.weight", lambda up: up.bfloat16()), ["bfloat16 and float32"]),
    "NaN weights": (put(NORM, lambda norm: norm * math.nan), [f"{NORM} has NaN or infinite values; no run"]),
    "index leads away": (
        index(lambda names: {names[0]: f"../{FILE}"}),
        ["'../model.safetensors' is no safetensors file"],
    ),
    "index": (
        index(lambda names: dict.fromkeys(names[1:], FILE)),
        ["is not in model.safetensors.index.json"],
    ),
    "pickled": (pickled, ["only pytorch_model.bin, which is pickled and not read"]),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), ["config.json: missing or damaged"]),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_converted_is_refused(
    case: str, mixtral: Path, tmp_path: Path, refused: Refused
) -> None:
    change, words = CASES[case]
    change(Path(shutil.copytree(mixtral, tmp_path / "hf")))
    line = refused("convert_hf", "import", "hf", "run")
    for word in words:
        assert word in line
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "something half-written"


@pytest.mark.parametrize("case", cases("hf", "config.json: "))
def test_keys_of_config_json(
    case: Case, mixtral: Path, tmp_path: Path, refused: Refused, expect_message: Callable[..., None]
) -> None:
    change_config(Path(shutil.copytree(mixtral, tmp_path / "hf")), **case["changes"])
    expect_message(case, refused("convert_hf", "import", "hf", "run"))
    assert [path.name for path in tmp_path.iterdir()] == ["hf"], "something half-written"


def test_keys_that_other_programs_leave_are_told_and_ignored(
    mixtral: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(shutil.copytree(mixtral, tmp_path / "hf"))
    change_config(folder, unsloth_version="2026.1", tokenizer_class="LlamaTokenizer")
    assert tool("convert_hf").main(["import", "hf", "run"]) == 0
    assert "ignored keys of config.json: tokenizer_class, unsloth_version\n" in capsys.readouterr().out


def test_a_run_that_exists_is_not_replaced(mixtral: Path, tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "run").mkdir()
    assert "exists" in refused("convert_hf", "import", mixtral, "run")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_stands_in_the_way_of_a_class_is_named(run: Path, tmp_path: Path, refused: Refused) -> None:
    cases = {
        "moe.router.capacity.name per_expert": ["moe.router.capacity=per_expert"],
        "moe.router.scorer.name cosine": ["moe.router.scorer=cosine"],
        "moe.router.selector.scale 2.0": ["moe.router.selector.scale=2.0", "--class", "mixtral"],
        "moe.router.selector.scale 3.0": ["--class", "mixtral", "moe.router.selector.scale=3.0"],
        "model.norm layernorm": ["model.norm=layernorm", "--class", "olmoe"],
        "--class: found gpt2, expected one of llama": ["--class", "gpt2"],
    }
    for words, arguments in cases.items():
        assert words in refused("convert_hf", "export", "run", "out", *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path, refused: Refused) -> None:
    shard = run / "checkpoints/step_00000000/shard_00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert "shard_00001.safetensors: damaged" in refused("convert_hf", "export", "run", "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_like_names_a_folder(run: Path, tmp_path: Path, refused: Refused) -> None:
    """Its class does not matter if --class names another: it may hold a tokenizer alone."""
    (tmp_path / "like").mkdir()
    words = {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}
    (tmp_path / "like/tokenizer.json").write_text(tokenizer := json.dumps({"version": "1.0", "model": words}))
    (tmp_path / "like/config.json").write_text('{"model_type": "gpt2"}')
    arguments = ["export", str(run), str(tmp_path / "out"), "--like", str(tmp_path / "like")]
    assert tool("convert_hf").main(arguments) == 0
    assert (tmp_path / "out/tokenizer.json").read_text() == tokenizer
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "mixtral"
    assert "--like: " in refused("convert_hf", "export", "run", "no", "--like=nothing")


def test_a_folder_in_bf16_is_checked_in_bf16(tmp_path: Path, refused: Refused) -> None:
    """Experts of 12 columns can be computed in fp32, where the products take multiples of 4."""
    model = make("olmoe", tmp_path / "hf", intermediate_size=12)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    line = refused("convert_hf", "import", "hf", "run")
    assert (
        "12 is not a multiple of 8, which grouped experts need in bf16; save the folder's weights in" in line
    )
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    model.float().save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
