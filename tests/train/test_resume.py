"""What a checkpoint says of the model that it is the start of."""

from pathlib import Path

import pytest

from megamoe.config import to_dict
from megamoe.errors import UserError
from megamoe.train.resume import check_init
from tests.checkpoint_files import write_checkpoint
from tests.tiny import VOCABULARY, tiny


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint, of which its JSON is read before its tensors."""
    meta = {"vocabulary": VOCABULARY, "config": to_dict(tiny())}
    return write_checkpoint(tmp_path / "elsewhere" / "step_00000001", {}, **meta)


def init_from(saved: Path, run_folder: Path, *overrides: str) -> None:
    config = tiny(f"checkpoint.init.path={saved}", *overrides)
    check_init(config, VOCABULARY, run_folder)


OTHER_FUNCTIONS = {
    "num_attention_heads": ("2", "4"),
    "position": ("rope", "learned"),
    "rope_base": ("10000", "20000"),
    "norm": ("rmsnorm", "layernorm"),
    "norm_eps": ("1e-05", "1e-06"),
    "activation": ("swiglu", "gelu"),
}


@pytest.mark.parametrize("key", OTHER_FUNCTIONS)
def test_weights_are_not_the_start_of_another_function(saved: Path, tmp_path: Path, key: str) -> None:
    before, after = OTHER_FUNCTIONS[key]
    told = f"saved with model.{key} {before}, this run has {after}; start with the model's configuration"
    with pytest.raises(UserError, match=told):
        init_from(saved, tmp_path / "run", f"model.{key}={after}")


def test_what_does_not_change_the_function_may_differ(saved: Path, tmp_path: Path) -> None:
    free = ("model.hidden_dropout=0.1", "model.recompute=full", "optimizer.lr=1.0", "moe.losses.z_loss=0.1")
    init_from(saved, tmp_path / "run", *free)
