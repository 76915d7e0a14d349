"""The checks of a whole run: all topics together, and those between few keys."""

from collections.abc import Iterator
from typing import Any

from megamoe.config import shapes, to_dict
from megamoe.config.schema import DataConfig, MuonConfig, OptimizerConfig, Precision, RunConfig
from megamoe.errors import Problem
from megamoe.moe.capabilities import provides
from megamoe.moe.validation import part_problems
from megamoe.object_storage import has_credentials, without_credentials
from megamoe.optim.schedule import BatchSchedule
from megamoe.parallel.layout import Layout
from megamoe.parallel.zero.deepspeed_config import ParallelPlan
from megamoe.registry import get_part
from megamoe.validation import architecture
from megamoe.validation.backends import backend_problems
from megamoe.validation.deepspeed import deepspeed_problems
from megamoe.validation.layer_groups import group_problems, of_each_kind
from megamoe.validation.layout import layout_problems, row_unit
from megamoe.validation.mup import mup_problems
from megamoe.validation.pipeline import in_flight_problems, pipeline_problems
from megamoe.validation.recompute import recompute_problems, recompute_stage_problems
from megamoe.validation.schedule import batch_problems, schedule_problems
from megamoe.validation.training_objective import objective_problems, routing_record_problems


def validate(config: RunConfig, ranks: int, plan: ParallelPlan | None) -> Iterator[Problem]:
    """Yield every reason why a configuration cannot run, as far as no data is read.

    plan: what follows from the configuration on so many ranks; None: there is none, because the DeepSpeed
    file is wrong, and what needs the file or the precision is not checked. A check whose premise does not
    hold, such as one of layers at blocks that do not exist, is left out.
    """
    yield from credential_problems(to_dict(config))
    yield from section_problems(config, ranks, None if plan is None else plan.precision)
    if plan is not None:
        fits = plan.layout.is_whole and not any(batch_problems(config, plan.layout.data))
        schedule = BatchSchedule.from_config(config.train, plan.layout.data) if fits else None
        yield from deepspeed_problems(config, plan, schedule)
        yield from pipeline_problems(config, plan, schedule)
        yield from in_flight_problems(config, plan, schedule)
        yield from recompute_stage_problems(config, plan)


def credential_problems(tree: Any, key: str = "") -> Iterator[Problem]:
    """Yield each URL with credentials: the run would write them into its folder, checkpoints and trackers."""
    for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        place = f"{key}[{name}]" if isinstance(tree, list) else f"{key}.{name}".lstrip(".")
        if isinstance(value, dict | list):
            yield from credential_problems(value, place)
        elif isinstance(value, str) and has_credentials(value):
            found = f"{without_credentials(value)} with credentials, which the run would record"
            yield Problem(place, f"found {found}; give them by the environment or the store's own file")


def section_problems(config: RunConfig, ranks: int, precision: Precision | None) -> Iterator[Problem]:
    """Yield the problems between the sections of the configuration, whatever the DeepSpeed file says.

    precision: of the weights; None: not known.
    """
    layout = Layout.of(config.parallel, ranks)
    yield from architecture.architecture_problems(config)
    yield from architecture.attention_problems(config.model)
    yield from objective_problems(config)
    yield from architecture.size_problems(config.model)
    misplaced = list(architecture.position_problems(config)) or list(group_problems(config))
    yield from misplaced
    if not misplaced:
        yield from layout_problems(config, layout, precision)
        yield from mup_problems(config)
        yield from _expert_problems(config, precision)
        yield from _start_problems(config)
    if layout.is_whole:
        yield from batch_problems(config, layout.data)
    yield from schedule_problems(config)
    yield from _optimizer_problems(config.optimizer)
    yield from _blend_problems(config.data)
    yield from backend_problems(config, precision)
    yield from recompute_problems(config)


def _optimizer_problems(optimizer: OptimizerConfig) -> Iterator[Problem]:
    """Yield keys that are Muon's where another optimizer was chosen."""
    if optimizer.name == "muon":
        return
    way_out = f"is for optimizer.name: muon, found {optimizer.name}; leave it out"
    if optimizer.muon != MuonConfig():
        yield Problem("optimizer.muon", way_out)
    for number, group in enumerate(optimizer.groups):
        if group.algorithm is not None:
            yield Problem(f"optimizer.groups.{number}.algorithm", way_out)


def _expert_problems(config: RunConfig, precision: Precision | None) -> Iterator[Problem]:
    if not shapes.moe_layer_numbers(config):
        yield from routing_record_problems(config, "the model has no MoE layer")
        return
    yield from of_each_kind(config, lambda own: _layer_problems(own, precision))


def _layer_problems(config: RunConfig, precision: Precision | None) -> Iterator[Problem]:
    """Yield the problems of one kind of MoE layers, see `of_each_kind`."""
    moe, ranks = config.moe, config.parallel.expert
    yield from part_problems(moe, 1 if moe.num_experts % ranks else ranks)
    yield from _causal_problems(config)
    yield from _gradient_problems(config)
    yield from _replay_problems(config)
    yield from _shared_problems(config)
    yield from _row_problems(config, precision)


def _gradient_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a selector that gives the router no gradient, where the router is to learn."""
    choice = config.moe.router.selector
    options: Any = choice.options
    is_one = getattr(options, "k", None) == 1 and provides("normalised", choice)
    if is_one and "router" not in config.moe.frozen:
        yield Problem(
            "moe.router.selector",
            f"with k: 1 the weights {options.weights!r} are always 1 and the router would get no gradient; "
            "set weights: raw, or moe.frozen: [router]",
        )


def _causal_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a selector that chooses by later tokens where a decoder has MoE layers."""
    choice = config.moe.router.selector
    layers = [stack for stack in shapes.stacks(config) if stack.name == "decoder"]
    in_decoder = any(stack.moe_blocks or stack.layers.insert_after for stack in layers)
    if in_decoder and provides("sees_later_tokens", choice):
        yield Problem(
            "moe.router.selector",
            f"{choice.name}: in a decoder a token's experts would depend on later tokens, so that evaluation "
            "is not that of a language model; set allow_non_causal: true to accept that, or choose top_k",
        )


def _replay_problems(config: RunConfig) -> Iterator[Problem]:
    router = config.moe.router
    selector: Any = get_part("selector", router.selector.name)
    if router.replay is not None and not selector.replays(router.selector.options):
        yield Problem(
            "moe.router.replay",
            f"{router.replay}: weights of selector {router.selector.name} with these options do not follow "
            "from a token's experts alone; choose another moe.router.selector",
        )


def _shared_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield what shared experts lack, and inserted layers or sub-layers that experts do not fit."""
    moe = config.moe
    if moe.zero_experts.total and moe.expert_sublayers > 1:
        yield Problem(
            "moe.zero_experts",
            f"found {moe.zero_experts.total}, but experts of {moe.expert_sublayers} residual sub-layers "
            "(moe.expert_sublayers) have no identity; set the sub-layers to 1",
        )
    if moe.weights_in_activation and (moe.expert_bias or moe.expert_sublayers > 1):
        lacks = "moe.expert_bias" if moe.expert_bias else "moe.expert_sublayers above 1"
        yield Problem(
            "moe.weights_in_activation",
            f"found true, but with {lacks} an expert's output is no multiple of its activation; set false",
        )
    if moe.latent_size is not None and moe.expert_sublayers > 1:
        yield Problem(
            "moe.latent_size",
            f"found {moe.latent_size}, but {moe.expert_sublayers} residual sub-layers of an expert "
            "(moe.expert_sublayers) stand in the hidden space; set it to null, or the sub-layers to 1",
        )
    if moe.latent_size is not None and moe.latent_size >= config.model.hidden_size:
        yield Problem(
            "moe.latent_size",
            f"found {moe.latent_size}, expected less than model.hidden_size, {config.model.hidden_size}: the "
            "exchange would not shrink; set it to null for experts without projections",
        )
    for key, default in (("shared_expert_ffn_hidden_size", None), ("shared_expert_mode", "sum")):
        if (value := getattr(moe, key)) != default and moe.num_shared_experts == 0:
            without = "but moe.num_shared_experts is 0; leave it out, or set that to 1"
            yield Problem(f"moe.{key}", f"found {value}, {without}")
    if shapes.inserted_after(config) and moe.num_shared_experts and not shapes.inserted_has_norm(moe):
        yield Problem(
            "moe.num_shared_experts",
            f"found {moe.num_shared_experts}, but in an inserted layer (moe.layers.insert_after) routed "
            "experts alone have the norms of sub-layers; set it to 0, or moe.expert_sublayers to 1",
        )


def _row_problems(config: RunConfig, precision: Precision | None) -> Iterator[Problem]:
    """Yield sizes of experts' rows that are not aligned."""
    unit, default = row_unit(precision), config.moe.expert_ffn_hidden_size is None
    rows = "model.hidden_size" if config.moe.latent_size is None else "moe.latent_size"
    whose_ffn = " (that of the dense blocks)" * default
    for key, size, whose in (
        (rows, shapes.expert_hidden_size(config), ""),
        ("moe.expert_ffn_hidden_size", shapes.expert_ffn_size(config), whose_ffn),
    ):
        if size % unit:
            yield Problem(
                key, f"{size}{whose} is not a multiple of {unit}, which grouped experts need in {precision}"
            )


def _start_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield frozen modules that do not exist, and a dense checkpoint's FFN that cannot become the experts."""
    experts, key = config.checkpoint.init.experts, "checkpoint.init.experts"
    dense, frozen = not shapes.moe_layer_numbers(config), config.moe.frozen
    if frozen and dense:
        yield Problem("moe.frozen", f"found {', '.join(frozen)}, but no block is MoE (moe.layers)")
    if experts == "same":
        return
    if config.checkpoint.init.path is None:
        yield Problem(key, f"found {experts}, but checkpoint.init.path names no dense checkpoint")
    if dense:
        yield Problem(key, f"found {experts}, but no block is MoE (moe.layers); say same")
    if shapes.inserted_after(config):
        yield Problem(
            key, f"found {experts}, but a dense model has no FFN at moe.layers.insert_after; use at or every"
        )
    yield from of_each_kind(config, _sublayer_problems)


def _sublayer_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield experts that cannot be made of an FFN."""
    sublayers, experts = config.moe.expert_sublayers, config.checkpoint.init.experts
    if config.moe.latent_size is not None:
        yield Problem(
            "checkpoint.init.experts",
            f"found {experts}, but a dense FFN computes hidden states, and these experts rows of size "
            f"{config.moe.latent_size}; set moe.latent_size=null",
        )
    if sublayers > 1:
        yield Problem(
            "checkpoint.init.experts",
            f"found {experts}, but experts of {sublayers} sub-layers are no FFN; set moe.expert_sublayers=1",
        )


def _blend_problems(data: DataConfig) -> Iterator[Problem]:
    """Yield the sources' weights if they are given in two ways."""
    if data.sampling_exponent is None:
        return
    key, found = "data.sampling_exponent", f"found {data.sampling_exponent:g}"
    if data.mock:
        yield Problem(key, f"{found}, but data.mock has no sources to weigh; leave it out")
    for place, source in enumerate(data.sources):
        if source.weight != 1:
            yield Problem(
                key,
                f"{found}, from which the weights follow, but data.sources.{place} ({source.path}) has the "
                f"weight {source.weight:g}; leave the exponent or the weights out",
            )
