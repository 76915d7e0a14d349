"""Whether a checkpoint is one that this run can go on from (same layout, same model, same data), or one
whose weights it can start from."""

from pathlib import Path
from typing import Any

from megamoe.config import RunConfig, to_dict
from megamoe.errors import UserError
from megamoe.parallel.checkpoint import check_layout, layout, read_meta
from megamoe.parallel.deepspeed_config import resolve_precision, zero_stage

# Keys that decide the tensors' shapes, or which sample comes next. The rest may change.
SAME = {
    "": ("seed",),
    "model": ("*",),
    "moe": (
        "layers",
        "num_experts",
        "expert_ffn_hidden_size",
        "num_shared_experts",
        "shared_expert_mode",
        "expert_sublayers",
        "frozen",
    ),
    "data": ("sources", "split", "mock", "sequence_length", "document_aware"),
}
FREE = ("hidden_dropout", "attention_dropout", "recompute", "vocab_size")  # the vocabulary is compared
RESUME_WAY_OUT = "resume with the configuration that saved it"
INIT_WAY_OUT = "start with the model's configuration that saved it"


def check_resume(
    config: RunConfig, vocabulary: int, ranks: int, deepspeed: dict[str, Any], path: Path
) -> None:
    """Refuse before anything is built.

    Raises:
        UserError: naming the first key that differs, both values, and the way out.
    """
    meta = read_meta(path)
    now = layout(ranks, config.parallel.expert, zero_stage(deepspeed), resolve_precision(config, deepspeed))
    check_layout(path, meta, now)
    _same(path, "vocabulary", meta["vocabulary"], vocabulary)
    saved, current = meta["config"], to_dict(config)
    for section, keys in SAME.items():
        before, after = (saved[section], current[section]) if section else (saved, current)
        for key in after if keys == ("*",) else keys:
            if key not in FREE:
                _same(path, f"{section}.{key}".lstrip("."), before.get(key), after[key])


def check_init(config: RunConfig, vocabulary: int, run_folder: Path) -> None:
    """Refuse to start from the weights of `checkpoint.init.path` what would make another function of them.

    Raises:
        UserError: naming the first key that differs, or that the checkpoint lies in this run's own folder.
    """
    assert config.checkpoint.init.path is not None
    path = Path(config.checkpoint.init.path)
    meta = read_meta(path, "checkpoint.init.path")
    if path.resolve().is_relative_to(run_folder.resolve()):
        raise UserError(
            f"checkpoint.init.path: {path} lies in this run's own folder, which a new run empties; "
            "set name=... to another one, or go on with --resume"
        )
    _same(path, "vocabulary", meta["vocabulary"], vocabulary, INIT_WAY_OUT)
    # The tensors' names and shapes tell everything else that decides what the weights mean.
    heads = meta["config"]["model"]["num_attention_heads"]
    _same(path, "model.num_attention_heads", heads, config.model.num_attention_heads, INIT_WAY_OUT)


def _same(path: Path, key: str, before: Any, after: Any, way_out: str = RESUME_WAY_OUT) -> None:
    if before != after:
        raise UserError(f"{path}: saved with {key} {_short(before)}, this run has {_short(after)}; {way_out}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."
