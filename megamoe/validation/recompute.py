"""Checks of the list `model.recompute` against the model, its backend and the ZeRO stage."""

from collections.abc import Iterator, Sequence

from megamoe.config.layer_kinds import kinds
from megamoe.config.schema import RunConfig
from megamoe.config.shapes import moe_layer_numbers
from megamoe.errors import Problem
from megamoe.model import backends
from megamoe.parallel.zero.deepspeed_config import ParallelPlan

KEY = "model.recompute"
WHOLE = ("block", "moe_layer")  # a module that others are parts of
OF_EXPERTS = ("experts_activation", "moe", "shared_experts")
AT_ZERO_3 = ("norms", "latent_up")


def recompute_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield modules of the list that the model does not have, that others contain, or that a backend has."""
    model = config.model
    if isinstance(model.recompute, str):
        return
    chosen = model.recompute
    if len(set(chosen)) < len(chosen):
        yield Problem(KEY, f"{_shown(chosen)} names a module twice; name each once")
    if "block" in chosen and len(set(chosen)) > 1:
        yield Problem(KEY, f"{_shown(chosen)}: block contains all others; leave the others out, or block")
    if "moe_layer" in chosen and (parts := [each for each in OF_EXPERTS if each in chosen]):
        yield Problem(KEY, f"{_shown(chosen)}: moe_layer contains {', '.join(parts)}; leave one side out")
    if "moe" in chosen and "experts_activation" in chosen:
        yield Problem(KEY, f"{_shown(chosen)}: moe contains experts_activation; leave one of them out")
    has_shared = any(kind.moe.num_shared_experts for kind in kinds(config))
    for name, is_there, needed in (
        ("latent_up", model.latent is not None, "model.latent"),
        ("shared_experts", has_shared, "moe.num_shared_experts above 0"),
        *((each, bool(moe_layer_numbers(config)), "an MoE layer") for each in ("moe", "moe_layer")),
    ):
        if name in chosen and not is_there:
            yield Problem(KEY, f"found {name}, which needs {needed}; leave it out")
    engine = backends.uses_transformer_engine(model)
    kept = {
        "norms": engine or backends.uses_apex_norms(model),
        "core_attention": engine and backends.engine_attends(config),
        **dict.fromkeys(("latent_up", "moe"), model.fp8 != "none"),
    }
    for name, is_kept in kept.items():
        if name in chosen and is_kept:
            what = f"model.fp8 {model.fp8}" if model.fp8 != "none" else "Transformer Engine or Apex"
            yield Problem(
                KEY,
                f"found {name}, which is not possible with {what}; leave it out, take moe_layer or block, or "
                "set model.backend: torch and model.norm_kernel: torch",
            )


def recompute_stage_problems(config: RunConfig, plan: ParallelPlan) -> Iterator[Problem]:
    """Yield modules that cannot be computed again where their weights are gathered for a moment only."""
    chosen = () if isinstance(config.model.recompute, str) else config.model.recompute
    for name in AT_ZERO_3:
        if plan.stage == 3 and name in chosen:
            where = config.parallel.deepspeed or "the DeepSpeed file"
            yield Problem(
                KEY,
                f"found {name} at zero_optimization.stage 3 ({where}), which does not gather these weights "
                "for the operators that read the values; leave it out, or take stage 0, 1 or 2",
            )


def _shown(chosen: Sequence[str]) -> str:
    return f"[{', '.join(chosen)}]"
