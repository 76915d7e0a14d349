"""Checks of muP: every size that grows with the width has one in the base model, and no other factor does."""

from collections.abc import Iterator

from megamoe.config.model_schema import ModelConfig, MupConfig
from megamoe.config.schema import RunConfig
from megamoe.config.shapes import expert_ffn_size, ffn_size, head_size, shared_ffn_size
from megamoe.errors import Problem
from megamoe.optim.parameter_groups import decays
from megamoe.validation.layer_groups import of_each_kind


def mup_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of `model.mup` with the model's other keys."""
    model, mup = config.model, config.model.mup
    if mup is None:
        return
    refused = list(_unknown_problems(model))
    yield from refused
    if config.optimizer.name == "adam" and decays(config.optimizer):
        yield Problem(
            "optimizer.name",
            "found adam, whose weight decay is a part of the gradient, but model.mup scales a decay of the "
            "weights; set adamw, or optimizer.weight_decay: 0",
        )
    width, left = divmod(model.hidden_size, mup.base)
    if left:
        yield Problem(
            "model.mup.base",
            f"{mup.base} does not divide model.hidden_size {model.hidden_size}; name one that does",
        )
    elif not refused:
        yield from _head_problems(model, mup, width)
        yield from _divided(mup, width, {"model.ffn_hidden_size": ffn_size(model)})
        yield from of_each_kind(config, lambda own: _divided(mup, width, _expert_sizes(own)))


def _unknown_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield what nobody has worked out the widths for, and other factors that depend on the width."""
    scales = model.scale_embeddings
    found = {
        "model.architecture": (model.architecture, model.architecture == "decoder", "decoder"),
        "model.latent": ("latent attention", model.latent is None, "none: its ranks may not grow"),
        "model.init_scale": (model.init_scale, model.init_scale is None, "none: init_std is scaled"),
        "model.scale_embeddings": (scales, not scales, "false: it grows; give embedding_scale instead"),
    }
    for key, (value, fits, expected) in found.items():
        if not fits:
            yield Problem(key, f"found {value}, but model.mup needs {expected}")


def _expert_sizes(config: RunConfig) -> dict[str, int]:
    size, latent = expert_ffn_size(config), config.moe.latent_size
    return {
        "moe.expert_ffn_hidden_size": size,
        "moe.shared_expert_ffn_hidden_size": shared_ffn_size(config.moe, size),
        **({} if latent is None else {"moe.latent_size": latent}),
    }


def _divided(mup: MupConfig, width: int, sizes: dict[str, int]) -> Iterator[Problem]:
    for key, value in sizes.items():
        if value % width:
            yield Problem(key, f"{value} does not divide by {width}: {_times(mup, width)}")


def _times(mup: MupConfig, width: int) -> str:
    return f"model.mup.base {mup.base} makes the model {width} times as wide as its base"


def _head_problems(model: ModelConfig, mup: MupConfig, width: int) -> Iterator[Problem]:
    size = head_size(model)
    columns, unit = model.num_attention_heads * size, width * (mup.base_head_size or size)
    if columns % unit:
        yield Problem(
            "model.num_attention_heads",
            f"{model.num_attention_heads} heads of {size} columns make no whole number of heads of "
            f"{unit // width}: {_times(mup, width)}; choose other heads, or model.mup.base_head_size",
        )
