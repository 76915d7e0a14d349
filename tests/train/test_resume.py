"""Checks of a checkpoint's configuration for a run that starts from its weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megamoe import registry
from megamoe.checkpoint.format.reader import WEIGHT
from megamoe.config import RunConfig, to_dict
from megamoe.errors import UserError
from megamoe.model.size import part_shapes
from megamoe.train.resume import RULES, check_init, check_resume, rule_of
from tests.support.checkpoint_files import write_checkpoint
from tests.support.tiny import VOCABULARY, tiny


def checkpoint_of(tmp_path: Path, config: dict[str, Any], vocabulary: int = VOCABULARY) -> Path:
    """A checkpoint of such a run without tensors: its JSON is read before them."""
    return write_checkpoint(
        tmp_path / "elsewhere" / "step_00000001", {}, vocabulary=vocabulary, config=config
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return checkpoint_of(tmp_path, to_dict(tiny()))


def init_from(saved: Path, run_folder: Path, *overrides: str) -> None:
    config = tiny(f"checkpoint.init.path={saved}", *overrides)
    check_init(config, VOCABULARY, run_folder)


OTHER_FUNCTIONS = {
    "num_attention_heads": ("2", "4"),
    "position": ("rope", "learned"),
    "rope_base": ("10000.0", "20000.0"),
    "rotary.share": ("1.0", "0.5"),
    "rotary.interleaved": ("False", "true"),
    "norm": ("rmsnorm", "layernorm"),
    "norm_eps": ("1e-05", "1e-06"),
    "activation": ("swiglu", "gelu"),
    "norm_position": ("pre", "post"),
    "scale_embeddings": ("False", "true"),
    "embedding_scale": ("None", "2.0"),
    "residual_scale": ("1.0", "0.5"),
    "logit_scale": ("1.0", "0.5"),
    "logit_soft_cap": ("None", "30.0"),
    "attention.window": ("None", "5"),
    "attention.soft_cap": ("None", "5.0"),
    "attention.scale": ("None", "0.5"),
}
NEWER = (
    *("multi_token_prediction", "embedding_scale", "residual_scale", "logit_scale", "logit_soft_cap"),
    *("attention", "rotary", "latent", "head_size", "architecture", "encoder_layers", "norm_position"),
    *("scale_embeddings", "head_transform", "num_labels", "pooling", "pooler"),
)


@pytest.mark.parametrize("key", OTHER_FUNCTIONS)
def test_weights_are_not_the_start_of_another_function(saved: Path, tmp_path: Path, key: str) -> None:
    before, after = OTHER_FUNCTIONS[key]
    shown = "True" if after == "true" else after
    message = f"saved with model.{key} {before}, this run has {shown}; start with the model's configuration"
    with pytest.raises(UserError, match=message):
        init_from(saved, tmp_path / "run", f"model.{key}={after}")


def test_weights_are_not_the_start_with_another_vocabulary(saved: Path, tmp_path: Path) -> None:
    message = f"saved with vocabulary {VOCABULARY}, this run has 28; start with the model's configuration"
    with pytest.raises(UserError, match=message):
        check_init(tiny(f"checkpoint.init.path={saved}"), 28, tmp_path / "run")


def test_experts_keep_the_activation_that_they_learned_with(saved: Path, tmp_path: Path) -> None:
    """The checkpoint may name the activation of the experts, or of all FFNs."""
    message = (
        "saved with moe.expert_activation swiglu, this run has relu; start with the model's configuration"
    )
    with pytest.raises(UserError, match=message):
        init_from(saved, tmp_path / "run", "moe.expert_activation=relu")
    init_from(saved, tmp_path / "run", "moe.expert_activation=swiglu")
    init_from(saved, tmp_path / "run", "moe.expert_activation=relu", "moe.layers=none")
    own = checkpoint_of(tmp_path, to_dict(tiny("moe.expert_activation=relu")))
    init_from(own, tmp_path / "run", "moe.expert_activation=relu")
    with pytest.raises(UserError, match="saved with moe.expert_activation relu, this run has swiglu"):
        init_from(own, tmp_path / "run")


def test_experts_made_of_a_dense_ffn_have_its_activation(tmp_path: Path) -> None:
    dense = checkpoint_of(tmp_path, to_dict(tiny("moe.layers=none", "moe.expert_activation=relu")))
    init_from(dense, tmp_path / "run", "checkpoint.init.experts=copy")
    with pytest.raises(UserError, match="saved with moe.expert_activation swiglu, this run has relu"):
        init_from(dense, tmp_path / "run", "checkpoint.init.experts=cut", "moe.expert_activation=relu")


def test_a_checkpoint_from_before_the_key_has_the_models_activation(tmp_path: Path) -> None:
    config = to_dict(tiny("model.activation=gelu"))
    del config["moe"]["expert_activation"]
    old = checkpoint_of(tmp_path, config)
    init_from(old, tmp_path / "run", "model.activation=gelu")


def test_a_checkpoint_from_before_the_architectures_is_of_a_decoder(tmp_path: Path) -> None:
    config = to_dict(tiny("moe.layers=none"))
    for key in NEWER:
        del config["model"][key]
    for stack in ("encoder", "decoder"):
        del config["moe"]["layers"][stack]
    del config["train"]["objective"]
    old = checkpoint_of(tmp_path, config)
    check_resume(tiny("moe.layers=none"), VOCABULARY, old)
    init_from(old, tmp_path / "run", "moe.layers=none")
    encoder = ("moe.layers=none", "model.architecture=encoder", "train.objective=masked")
    message = "saved with model.architecture decoder, this run has encoder; "
    with pytest.raises(UserError, match=message + "resume with the configuration"):
        check_resume(tiny(*encoder), VOCABULARY + 1, old)
    with pytest.raises(UserError, match=message + "start with the model's configuration"):
        init_from(old, tmp_path / "run", *encoder)
    with pytest.raises(UserError, match="saved with model.norm_position pre, this run has post"):
        check_resume(tiny("moe.layers=none", "model.norm_position=post"), VOCABULARY, old)


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ("seed=7", "seed 1234", 7),
        ("data.document_aware=true", "data.document_aware False", True),
        ("data.sequence_length=16", "data.sequence_length 8", 16),
        ("model.hidden_size=32", "model.hidden_size 16", 32),
        ("model.num_layers=3", "model.num_layers 2", 3),
        ("moe.num_experts=8", "moe.num_experts 4", 8),
    ],
)
def test_another_model_or_other_data_is_another_run(
    saved: Path, change: str, before: str, after: object
) -> None:
    with pytest.raises(UserError) as refused:
        check_resume(tiny(change), VOCABULARY, saved)
    way_out = "resume with the configuration that saved it"
    assert str(refused.value) == f"{saved}: saved with {before}, this run has {after}; {way_out}"
    with pytest.raises(UserError, match=f"saved with vocabulary {VOCABULARY}, this run has 28; {way_out}"):
        check_resume(tiny(), 28, saved)


def test_another_objective_is_another_run(tmp_path: Path) -> None:
    encoder = ("model.architecture=encoder", "moe.layers=none", "train.objective=masked")
    saved = checkpoint_of(tmp_path, to_dict(tiny(*encoder)), VOCABULARY + 1)
    check_resume(tiny(*encoder), VOCABULARY + 1, saved)
    other = tiny(*encoder[:2], "train.objective={name: masked, probability: 0.3}")
    with pytest.raises(UserError, match="saved with train.objective.probability 0.15, this run has 0.3;"):
        check_resume(other, VOCABULARY + 1, saved)
    whole_words = tiny(*encoder[:2], "train.objective={name: masked, unit: word}")
    with pytest.raises(UserError, match="saved with train.objective.unit token, this run has word; resume"):
        check_resume(whole_words, VOCABULARY + 1, saved)


def test_another_optimizer_may_resume_with_the_moments(tmp_path: Path) -> None:
    """AdamW and Adam keep the same state; a checkpoint from before the key had AdamW."""
    config = to_dict(tiny("moe.layers=none"))
    del config["optimizer"]["name"]
    dense = checkpoint_of(tmp_path, config)
    told = ["changed since the checkpoint: optimizer adamw -> adam"]
    for name, lines in (("adamw", []), ("adam", told)):
        assert check_resume(tiny("moe.layers=none", f"optimizer.name={name}"), VOCABULARY, dense) == lines


def test_a_blend_is_weighed_as_before(tmp_path: Path) -> None:
    """The exponent decides which sample comes next; a checkpoint from before the key had none."""
    data = "data={sources: [a, b], sequence_length: 8}"
    config = to_dict(tiny("moe.layers=none", data))
    del config["data"]["sampling_exponent"]
    saved = checkpoint_of(tmp_path, config)
    check_resume(tiny("moe.layers=none", data), VOCABULARY, saved)
    with pytest.raises(UserError, match="saved with data.sampling_exponent None, this run has 0.7; resume"):
        check_resume(tiny("moe.layers=none", data, "data.sampling_exponent=0.7"), VOCABULARY, saved)


def test_what_does_not_change_the_function_may_differ(saved: Path, tmp_path: Path) -> None:
    free = ("model.hidden_dropout=0.1", "model.recompute=full", "optimizer.lr=1.0", "moe.losses.z_loss=0.1")
    init_from(saved, tmp_path / "run", *free)


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        below = isinstance(value, dict) and value
        found += leaves(value, f"{prefix}{key}.") if below else [f"{prefix}{key}"]
    return found


def test_every_key_has_a_rule_and_every_rule_a_key() -> None:
    keys = leaves(to_dict(RunConfig()))
    assert {rule_of(key) for key in keys} == {"same", "function", "told", "launch"}
    unused = [rule for rule in RULES if not any(f"{key}.".startswith(f"{rule}.") for key in keys)]
    assert unused == []


@pytest.fixture
def routed(tmp_path: Path) -> Path:
    """A checkpoint with the tensors of its router."""
    shapes = part_shapes(tiny(), VOCABULARY)
    tensors = {
        f"{WEIGHT}decoder.layers.{block}.mlp.{name}": torch.zeros(shape)
        for block in (0, 1)
        for name, shape in shapes.items()
    }
    folder = tmp_path / "routed" / "step_00000001"
    return write_checkpoint(folder, tensors, vocabulary=VOCABULARY, config=to_dict(tiny()))


def test_each_change_is_told(routed: Path) -> None:
    changed = tiny("optimizer.lr=0.5", "train.micro_batch_size=3", "moe.losses.z_loss=0.1", "name=other")
    before, loss = tiny(), to_dict(changed)["moe"]["losses"]["z_loss"]
    assert check_resume(changed, VOCABULARY, routed) == [
        f"changed since the checkpoint: moe.losses.z_loss None -> {loss}",
        f"changed since the checkpoint: optimizer.lr {before.optimizer.lr} -> 0.5",
        f"changed since the checkpoint: train.micro_batch_size {before.train.micro_batch_size} -> 3",
    ]
    assert check_resume(tiny(), VOCABULARY, routed) == []


def test_a_changed_plugin_is_told(
    tmp_path: Path, own_registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is known by its name, wherever it lies. Of a package each file counts."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package, moved = tmp_path / "parts_that_change", tmp_path / "moved"
    for folder in (package, moved):
        folder.mkdir()
    for file in (package / "__init__.py", package / "old.py", tmp_path / "mine.py", moved / "mine.py"):
        file.write_text("")

    def config_of(file: Path) -> RunConfig:
        return tiny("moe.layers=none", f"plugins=[{file}, {package.name}]")

    config = config_of(tmp_path / "mine.py")
    folder, without = tmp_path / "step_00000001", checkpoint_of(tmp_path, to_dict(config))
    digests = registry.plugin_digests(config.plugins)
    assert digests.keys() == {"mine.py", f"{package.name}: __init__.py", f"{package.name}: old.py"}
    own = config_of(moved / "mine.py")
    write_checkpoint(folder, {}, vocabulary=VOCABULARY, config=to_dict(own), plugins=digests)
    assert check_resume(own, VOCABULARY, folder) == []
    (moved / "mine.py").write_text("x = 1")
    (package / "old.py").rename(package / "new.py")
    own = config_of(moved / "mine.py")
    assert check_resume(own, VOCABULARY, folder) == [
        f"changed since the checkpoint: plugin {name}"
        for name in (
            "mine.py (another SHA-256)",
            f"{package.name}: new.py (new)",
            f"{package.name}: old.py (removed)",
        )
    ]
    (only,) = check_resume(own, VOCABULARY, without)  # from before the digests were stored
    assert only.startswith("changed since the checkpoint: plugins [")


@pytest.mark.parametrize(
    ("change", "key", "before", "after"),
    [
        ("moe.router.score_function=sigmoid", "moe.router.score_function", "softmax", "sigmoid"),
        ("moe.router.selector={name: top_k, k: 3}", "moe.router.selector.k", "2", "3"),
        ("moe.router.capacity={name: per_expert, factor: 1}", "moe.router.capacity", "none", "per_expert"),
    ],
)
def test_another_function_needs_leave(routed: Path, change: str, key: str, before: str, after: str) -> None:
    with pytest.raises(UserError) as refused:
        check_resume(tiny(change), VOCABULARY, routed)
    assert str(refused.value) == (
        f"{routed}: saved with {key} {before}, this run has {after}; the model would compute another "
        "function: resume with the configuration that saved it, or say checkpoint.allow_changes=true"
    )
    told = check_resume(tiny(change, "checkpoint.allow_changes=true"), VOCABULARY, routed)
    assert told == [f"changed since the checkpoint: {key} {before} -> {after}"]
