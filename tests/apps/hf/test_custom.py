"""Our class for transformers: equal to our model for each preset that it covers, and in others' trainers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from megamoe.apps.hf.custom.export import CODE, custom_family
from megamoe.apps.hf.export_run import export_run
from megamoe.apps.hf.import_folder import import_folder
from megamoe.config import load_config, to_dict
from megamoe.errors import UserError
from megamoe.moe.part import StepContext
from megamoe.parallel.placements import shardings
from tests.support.apps.hf_training import trained_beside
from tests.support.checkpoint_files import read_tensors, write_checkpoint
from tests.support.moe.build import set_tokens
from tests.support.ranks.pool import Pool
from tests.support.tiny import tiny_gpt

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_rank")
ROOT = Path(__file__).parents[3]
WORDS, LENGTH = 64, 24
SMALL = (
    "data.sources=[]",
    "data.mock=true",
    f"data.sequence_length={LENGTH}",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=40",
    f"model.vocab_size={WORDS}",
    "moe.expert_ffn_hidden_size=24",
)
NO_CAPACITY = "moe.router.capacity=none"
COVERED = yaml.safe_load((ROOT / "tests/snapshots/custom_class.yaml").read_text())
REFUSED: dict[str, str] = COVERED["refused"]  # what the class does not cover of them
PRESETS = sorted(path.stem for path in (ROOT / "examples/presets").glob("*.yaml"))
QUICK = ("x_moe_hypersphere", "deepseek_v3", "tables")
# Beside the presets: what models and routers can be.
OTHERS: dict[str, list[str]] = COVERED["others"]


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Give every weight a value that a mistake would show: norms and biases too."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.state_dict().items():
        if torch.is_tensor(tensor) and tensor.is_floating_point() and tensor.numel() > 1:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if "norm" in name and "weight" in name else 0.2 * noise)


def saved(folder: Path, base: str, *overrides: str) -> tuple[Any, StepContext]:
    """A random model of a preset with changes, and its checkpoint in `folder`."""
    config = load_config(ROOT / f"examples/presets/{base}.yaml", [*SMALL, *overrides])
    context = StepContext()
    model = tiny_gpt(config, context, WORDS).eval()
    randomise(model)
    state = {
        f"model/{name}": tensor for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)
    }
    write_checkpoint(folder, state, config=to_dict(config), vocabulary=WORDS)
    return model, context


def ours(model: Any, context: StepContext, tokens_BS: Tensor) -> Tensor:
    """The logits of our model, each sequence by itself."""
    found = []
    for tokens_S in tokens_BS:
        set_tokens(context, token_ids_T=tokens_S)
        position_1S = torch.arange(len(tokens_S))[None]
        found.append(model.whole_logits(tokens_S[None], position_1S))
    return torch.cat(found)


def loaded(folder: Path) -> Any:
    """The exported model, loaded as any other; every tensor must have its place."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, dtype=torch.float32
    )
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), about
    assert type(model).__module__.startswith("transformers_modules")
    return model.eval()


def exported(folder: Path, base: str, *overrides: str, **options: Any) -> Path:
    """The folder of the class with a random model of a preset with changes."""
    saved(folder / "step_00000001", base, NO_CAPACITY, *overrides)
    step, out = folder / "step_00000001", folder / "hf"
    export_run(step, out, model_class="custom", report=lambda line: None, **options)
    return out


def check_equal(folder: Path, base: str, *overrides: str) -> None:
    """Logits, those of padded batches, and greedy tokens with every cache are those of our model; an import
    and another export give the same weights and files.
    """
    model, context = saved(folder / "step_00000001", base, *overrides)
    export_run(folder / "step_00000001", folder / "out", model_class="custom", report=lambda line: None)
    theirs = loaded(folder / "out")
    tokens_BS = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected_BSV = ours(model, context, tokens_BS)
        found_BSV = theirs(tokens_BS).logits
        assert expected_BSV.std() > 0.05
        assert (found_BSV - expected_BSV).abs().max() < 2e-5
        padded_BS = torch.cat([torch.full((2, 3), 7), tokens_BS[:, :-3]], dim=1)
        mask_BS = (torch.arange(LENGTH) >= 3).long().expand_as(padded_BS)
        padded_BSV = theirs(padded_BS, attention_mask=mask_BS).logits[:, 3:]
        alone_BSV = ours(model, context, tokens_BS[:, :-3])
        assert (padded_BSV - alone_BSV).abs().max() < 2e-5
        prompt_BS = tokens_BS[:, :6]
        generated_BS = theirs.generate(
            prompt_BS, attention_mask=torch.ones_like(prompt_BS), max_new_tokens=8, do_sample=False
        )
        for _ in range(8):
            next_B = ours(model, context, prompt_BS)[:, -1].argmax(-1)
            prompt_BS = torch.cat([prompt_BS, next_B[:, None]], dim=1)
        assert torch.equal(generated_BS, prompt_BS)
        for how in ({"use_cache": False}, {"cache_implementation": "static"}):
            again_BS = theirs.generate(
                padded_BS[:, :9], attention_mask=mask_BS[:, :9], max_new_tokens=8, do_sample=False, **how
            )
            assert torch.equal(again_BS[:, 3:], generated_BS), how
    import_folder(folder / "out", folder / "run", report=lambda line: None)
    first, second = (
        read_tensors(folder / each) for each in ("step_00000001", "run/checkpoints/step_00000000")
    )
    assert first.keys() == second.keys()
    for weight, tensor in first.items():
        assert tensor.dtype == second[weight].dtype and torch.equal(tensor, second[weight]), weight
    cut = json.loads((folder / "run/checkpoints/step_00000000/index.json").read_text())["shardings"]
    assert {name for name, it in cut.items() if it.get("expert")} == {
        name for name, it in shardings(model).items() if it.expert
    }
    export_run(folder / "run", folder / "back", report=lambda line: None)
    assert_same_files(folder / "out", folder / "back")


def assert_same_files(one: Path, other: Path) -> None:
    """Two folders hold the same bytes."""
    first, second = ({path.name: path.read_bytes() for path in each.iterdir()} for each in (one, other))
    assert first.keys() == second.keys() and not [name for name in first if first[name] != second[name]]


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full])
        for name in PRESETS
        if name not in REFUSED
    ],
)
def test_presets_are_equal(preset: str, tmp_path: Path) -> None:
    check_equal(tmp_path, preset, NO_CAPACITY)


def test_presets_that_it_does_not_cover_are_refused_with_the_reason() -> None:
    for name, expected in REFUSED.items():
        with pytest.raises(UserError, match=re.escape(expected)):
            custom_family(Path("a"), load_config(ROOT / "examples/presets" / f"{name}.yaml", [NO_CAPACITY]))
    for overrides, expected in (
        (
            ["moe.router={scorer: hash, selector: {name: table, weights: raw}}"],
            "moe.router.selector.weights raw",
        ),
        (["moe.latent_size=8"], "moe.latent_size 8; override"),
        (
            ["model.activation=swiglu_clamped", "model.rotary={scaling: linear, factor: 2}"],
            "model.rotary.scaling linear, model.activation swiglu_clamped; override",
        ),
    ):
        with pytest.raises(UserError, match=f"it does not cover {expected}"):
            custom_family(Path("a"), load_config(None, ["moe.layers.every=1", *overrides]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.full]) for name in OTHERS]
)
def test_other_models_are_equal(name: str, tmp_path: Path) -> None:
    check_equal(tmp_path, "switch", NO_CAPACITY, *OTHERS[name])


def test_what_is_refused_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "step_00000001", "switch")
    expected = "--class custom: it does not cover moe.router.capacity.name per_expert; override"
    with pytest.raises(UserError, match=expected):
        export_run(tmp_path / "step_00000001", tmp_path / "out", model_class="custom")
    assert not (tmp_path / "out").exists()


def test_an_import_runs_no_code_and_refuses_a_changed_config(tmp_path: Path) -> None:
    out = exported(tmp_path, "hash")
    for name in CODE:
        (out / name).write_text("raise SystemExit('run')")
    given = json.loads((out / "config.json").read_text())
    sections = given["megamoe"]
    stable = {**sections, "moe": {**sections["moe"], "router": {"scorer": {"name": "stable"}}}}
    for changes, expected in (
        ({"head_dim": 16}, "head_dim: found 16, expected 8 by its key megamoe"),
        ({"vocab_size": 32}, "has shape .* says"),
        ({"megamoe": None}, "megamoe is missing or broken; export the model again"),
        ({"megamoe": {"model": {"x": 1}, "moe": {}}}, "model: unknown key 'x'"),
        ({"megamoe": stable}, "it does not cover moe.router.scorer.name stable"),
        ({"training_tensors": {"model.embedding.word_embeddings.weight": [1]}}, "training_tensors: found"),
        ({"training_tensors": [1]}, "training_tensors: found"),
    ):
        (out / "config.json").write_text(json.dumps({**given, **changes}))
        with pytest.raises(UserError, match=expected):
            import_folder(out, tmp_path / "run", report=lambda line: None)
    assert not (tmp_path / "run").exists()
    sections["moe"]["router"]["replay"] = "/etc/passwd"
    sections["model"]["backend"] = "transformer_engine"
    (out / "config.json").write_text(json.dumps(given))
    import_folder(out, tmp_path / "run", report=lambda line: None)
    text = (tmp_path / "run/continue.yaml").read_text()
    assert "passwd" not in text and "transformer_engine" not in text
    export_run(tmp_path / "run", tmp_path / "back", report=lambda line: None)
    assert (tmp_path / "back/modeling_megamoe.py").read_text().startswith('"""A megamoe decoder')


def test_the_files_need_neither_megamoe_nor_more_than_the_folder(tmp_path: Path) -> None:
    out = exported(tmp_path, "hash", dtype="bf16", shard_bytes=30_000)
    for path in out.glob("*.py"):
        assert "import megamoe" not in path.read_text() and "from megamoe" not in path.read_text()
    config = json.loads((out / "config.json").read_text())
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_megamoe.MegamoeForCausalLM"
    assert config["vocab_size"] == WORDS and config["dtype"] == "bfloat16"
    assert len(list(out.glob("*.safetensors"))) > 1


def test_it_suits_the_trainers_of_others(tmp_path: Path) -> None:
    """Losses of accumulated batches are divided by all their labels, as Trainer asks;
    it has a backbone, and takes another embedding.
    """
    model = loaded(exported(tmp_path, "switch", "model.tie_embeddings=false"))
    tokens_BS = torch.arange(2 * LENGTH).view(2, LENGTH) % WORDS
    labels_BS = tokens_BS.where(torch.arange(LENGTH) % 3 > 0, -100)
    count = {"num_items_in_batch": (labels_BS[:, 1:] != -100).sum()}
    halves = [model(tokens_BS[b, None], labels=labels_BS[b, None], **count).loss for b in (0, 1)]
    torch.testing.assert_close(sum(halves), model(tokens_BS, labels=labels_BS).loss)
    hidden_BSH = model.base_model(tokens_BS).last_hidden_state
    torch.testing.assert_close(model(tokens_BS).logits, model.model.output_layer(hidden_BSH))
    words = torch.nn.Embedding(WORDS, 32)
    model.set_input_embeddings(words)
    assert model.get_input_embeddings() is words
    model.resize_token_embeddings(WORDS + 6)
    assert model(tokens_BS).logits.shape[-1] == WORDS + 6


@pytest.mark.parametrize("k", [1, 2])
def test_the_auxiliary_loss_is_that_of_transformers(k: int, tmp_path: Path) -> None:
    """Also its gradient, with recomputed blocks of either kind; every router's choices are counted."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    selector = f"moe.router.selector={{name: top_k, k: {k}}}"
    model = loaded(exported(tmp_path, "switch", selector, "moe.losses.switch_balance.weight=0.25"))
    tokens_BS = torch.arange(2 * LENGTH).view(2, LENGTH) % WORDS
    mask_BS = (torch.arange(LENGTH) >= torch.tensor([[0], [5]])).long()
    inputs = {"attention_mask": mask_BS, "labels": tokens_BS}
    plain = model(tokens_BS, **inputs)
    assert plain.aux_loss is None and plain.router_logits is None
    model.config.output_router_logits = True
    output = model(tokens_BS, **inputs)
    assert [tuple(each.shape) for each in output.router_logits] == [(2 * LENGTH, 8)] * 2
    expected = load_balancing_loss_func(output.router_logits, 8, k, mask_BS)
    torch.testing.assert_close(output.aux_loss, expected)
    torch.testing.assert_close(output.loss, plain.loss + 0.25 * 2 / k * expected)  # two layers
    routers = [layer.router for name, layer in model.named_modules() if name.endswith("mlp.layer")]
    (gradient,) = torch.autograd.grad(expected, routers[0].scorer.weight, retain_graph=True)
    for reentrant in (None, False, True):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model.train().zero_grad()
        model(tokens_BS, attention_mask=mask_BS).aux_loss.backward()
        torch.testing.assert_close(routers[0].scorer.weight.grad, gradient)


STEPS = 3
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "gradient_checkpointing": True,
    "save_strategy": "no",
    "disable_tqdm": True,
}


def rows() -> list[dict[str, list[int]]]:
    found = torch.randint(3, WORDS, (16, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in found]


def of_transformers(model: Any, folder: Path) -> Any:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments, default_data_collator

    arguments = TrainingArguments(str(folder), **ARGUMENTS)
    return Trainer(model, arguments, default_data_collator, train_dataset=rows())


def of_trl(model: Any, folder: Path) -> Any:
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(n): n for n in range(WORDS)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="1", eos_token="2")
    arguments = trl.SFTConfig(str(folder), max_length=LENGTH, **ARGUMENTS)
    data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows()])
    return trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)


@pytest.mark.full
@pytest.mark.parametrize("make", [of_transformers, of_trl])
@pytest.mark.parametrize("aux", [False, True])
def test_three_steps_and_back(make: Any, aux: bool, tmp_path: Path) -> None:
    model = loaded(exported(tmp_path, "switch", "moe.router.scorer=noisy"))
    model.config.output_router_logits, model.config.router_aux_loss_coef = aux, 0.01 * aux
    trainer = make(model, tmp_path / "trained")
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == STEPS and losses[-1] < losses[0] < 30
    assert ("aux_loss" in trainer.state.log_history[0]) == (aux and make is of_trl)
    trainer.save_model()
    import_folder(tmp_path / "trained", tmp_path / "run", report=lambda line: None)
    back = read_tensors(tmp_path / "run/checkpoints/step_00000000")
    trained, first = (load_file(tmp_path / each / "model.safetensors") for each in ("trained", "hf"))
    assert {name.removeprefix("model/") for name in back} == trained.keys() == first.keys()
    assert all(torch.equal(back[f"model/{name}"], tensor) for name, tensor in trained.items())
    moved = {name for name in first if not torch.equal(first[name], trained[name])}
    still = {name for name in first if "noise_weight" in name}
    assert moved | still == first.keys() and not moved & still, first.keys() - moved


def beside(folder: Path) -> dict[str, float]:
    """Job: train the class and its import side by side."""
    return trained_beside(loaded(folder / "hf"), folder)


@pytest.mark.full
def test_an_import_trains_as_the_class(pool: Pool, tmp_path: Path) -> None:
    exported(tmp_path, "deepseek_v3")
    (found,) = pool.run(beside, tmp_path, ranks=1, timeout_s=600)
    assert found["gradient"] < 1e-5 and found["change"] > 3e-3 and found["weights"] < 1e-4
