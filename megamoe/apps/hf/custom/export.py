"""The class of our own for transformers: what it covers, its config.json, and its files.

Its weights have our names and shapes, so its table of tensors follows from its modules. They are built here
without numbers, so this export and its import need transformers, which the others do not. config.json also
has our sections `model` and `moe`, which an import reads; the code of a folder is not run.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megamoe.apps.hf.families.common import HEAD, loss_weight
from megamoe.apps.hf.family import Family, as_config
from megamoe.apps.hf.folder import CONFIG, GENERATION, short
from megamoe.apps.hf.keys import IRRELEVANT, Json, equal, value_of
from megamoe.apps.hf.rules import EXPERT_BIAS, EXPERT_DOWN, EXPERT_UP, WHOLE, BlockMapping, whole
from megamoe.checkpoint.format.reader import WEIGHT, CheckpointReader
from megamoe.config import RunConfig, to_dict
from megamoe.config.parts import PartChoice
from megamoe.config.shapes import (
    expert_activation,
    expert_ffn_size,
    ffn_size,
    has_input_bias,
    has_output_bias,
    head_size,
    inserted_after,
    moe_block_numbers,
    moe_layer_numbers,
    shared_ffn_size,
    window_of,
)
from megamoe.errors import UserError
from megamoe.parallel.chunks import Sharding
from megamoe.registry import get_part

CUSTOM = "custom"  # as the value of --class
CODE = ("configuration_megamoe.py", "modeling_megamoe.py", "routing_megamoe.py")
PACKAGE = "megamoe.apps.hf.custom"
# What the modules know. noisy, policy: a linear scorer once trained.
SCORERS = {"linear": "linear", "noisy": "linear", "policy": "linear", "cosine": "cosine", "hash": "hash"}
SCORE_FUNCTIONS = ("softmax", "sigmoid")
ONLY_IN_TRAINING, GROUP_LIMIT = ("expert_dropout", "gating_dropout"), "group_limit"  # masks
# sinkhorn, balanced, sample: once trained, they take a token's best experts.
SELECTORS = {"sinkhorn": "top_k", "balanced": "top_k", "sample": "top_k"}
SELECTORS |= {name: name for name in ("top_k", "threshold", "table", "entropy_aware")}
UNKNOWN_ACTIVATION = "swiglu_clamped"
SECTIONS, HELD = "megamoe", "training_tensors"  # keys of config.json
# What only training needs of a router and of a loss, whose name is the group.
OF_ROUTERS = re.compile(
    r"model\..*\.layer\.(?:router\.scorer\.(?:noise|group_noise|old|reference)_weight|losses\.(\w+)\.[\w.]+)"
)
# Keys of `model` that are of the machine or left out, and those of config.json that no import reads.
NOT_KEPT = {"recompute", "backend", "norm_kernel", "cpu_kernels", "gpu_kernels", "keep_freed_memory"}
NOT_KEPT |= {"fp8", "fp8_format", "fp8_amax_history"}
NOT_KEPT |= {"multi_token_prediction", "vocab_size", "vocab_multiple"}
NOT_COMPARED = {*IRRELEVANT, SECTIONS, "router_aux_loss_coef"}
SAME_NAME = (
    *("hidden_size", "num_attention_heads", "position", "rope_base", "norm", "norm_position", "norm_eps"),
    *("activation", "residual_scale", "logit_scale", "logit_soft_cap"),
)  # keys of `model` and of config.json
CUTS = {"up": EXPERT_UP, "down": EXPERT_DOWN, "up_bias": EXPERT_UP, "down_bias": EXPERT_BIAS}


@dataclass(frozen=True)
class CustomFamily(Family):
    """A `Family` whose config.json and tensors are those of `modeling_megamoe.py`.

    held: shapes of the tensors that only training needs, by name.
    """

    held: Json = field(default_factory=dict)

    def read(self, given: Json, where: str = CONFIG) -> Json:
        """Return the sections that an export wrote, if the other keys of config.json say the same.

        Raises:
            UserError: naming a key that is missing or says something else.
        """
        self._check_class(given, where)
        tree = given.get(SECTIONS)
        if not isinstance(tree, dict) or not all(isinstance(tree.get(key), dict) for key in ("model", "moe")):
            raise UserError(f"{where}: {SECTIONS} is missing or broken; export the model again")
        words = {"vocab_size": given.get("vocab_size")}
        config = as_config({"model": tree["model"] | words, "moe": tree["moe"]}, where)
        custom_family(Path(where), config)
        written = json.loads(json.dumps(self.write(config)))
        for name, value in written.items():
            if name not in NOT_COMPARED and not equal(given.get(name), value):
                raise UserError(
                    f"{where}: {name}: found {short(str(given.get(name)))}, expected {short(str(value))} by "
                    f"its key {SECTIONS}; export the model again"
                )
        return {"model": written[SECTIONS]["model"] | words, "moe": written[SECTIONS]["moe"]}

    def write(self, config: RunConfig) -> Json:
        """Return config.json but for the keys that every export adds."""
        automatic = {"AutoConfig": "configuration_megamoe.MegamoeConfig"}
        automatic["AutoModelForCausalLM"] = f"modeling_megamoe.{self.architecture}"
        head = {"architectures": [self.architecture], "model_type": self.model_type, "auto_map": automatic}
        tree = to_dict(config)
        model = {name: value for name, value in tree["model"].items() if name not in NOT_KEPT}
        tree["moe"]["router"]["replay"] = None  # a file
        kept = {SECTIONS: {"model": model, "moe": tree["moe"]}, HELD: self.held}
        return {**head, **_model(config), **_moe(config), **kept}

    def rules(self, config: RunConfig, num_words: int) -> list[list[BlockMapping]]:
        """Return a rule for each tensor of the modules: it has our name and shape."""
        import torch

        from megamoe.apps.hf.custom.configuration_megamoe import MegamoeConfig
        from megamoe.apps.hf.custom.modeling_megamoe import MegamoeForCausalLM

        content = {**self.write(config), "vocab_size": num_words}
        content["max_position_embeddings"] = config.data.sequence_length
        with torch.device("meta"):
            model: Any = MegamoeForCausalLM(MegamoeConfig(**content))
        buffers = {name for name, _ in model.named_buffers()}
        return [
            [
                BlockMapping(name, tuple(tensor.shape), (name,), whole, _cut(name), name in buffers, {})
                for name, tensor in model.state_dict().items()
                if not (config.model.tie_embeddings and name == HEAD)  # then a folder has the embedding alone
            ]
        ]


FAMILY = CustomFamily("megamoe", "MegamoeForCausalLM", keys=(), table=())


def _cut(name: str) -> Sharding:
    """Return how layouts shard a tensor, as far as it matters here: the experts."""
    return CUTS.get(name.rpartition(".")[2], Sharding(expert=True)) if ".experts." in name else WHOLE


def family_of_folder(given: Json, where: Path) -> Family:
    """Return the class of our own, with the tensors that a config.json says.

    Raises:
        UserError: if it names others than those of training.
    """
    held: Any = given.get(HELD)
    for name, shape in held.items() if isinstance(held, dict) else [("", held)]:
        sizes = shape if isinstance(shape, list) else [-1]
        if not OF_ROUTERS.fullmatch(name) or not all(type(size) is int and size >= 0 for size in sizes):
            raise UserError(f"{where}: {HELD}: found {short(f'{name} {shape}')}; export the model again")
    return replace(FAMILY, held=held or {})


def custom_family(path: Path, config: RunConfig, reader: CheckpointReader | None = None) -> Family:
    """Return the class of our own, with the tensors of a checkpoint that only training needs.

    Raises:
        UserError: naming the keys of the configuration that it does not cover.
    """
    if found := _obstacles(config):
        raise UserError(
            f"{path}: --class {CUSTOM}: it does not cover {', '.join(found)}; override keys that do not "
            "matter to you, such as moe.router.capacity=none"
        )
    held: Json = {}
    for name in reader.names(WEIGHT) if reader else ():
        match = OF_ROUTERS.fullmatch(name.removeprefix(WEIGHT))
        if reader and match and (match[1] is None or match[1] in config.moe.losses):
            held[match[0]] = list(reader.shape(name))
    return replace(FAMILY, held=held)


def custom_files() -> dict[str, bytes]:
    """Return the files of the class by name; they import each other by their place in the folder."""
    texts = {name: (Path(__file__).parent / name).read_text(encoding="utf-8") for name in CODE}
    files = {name: text.replace(f"from {PACKAGE}.", "from .").encode() for name, text in texts.items()}
    # The loop over experts has numbers of tokens that differ at every step, which compiling would not stand.
    return files | {GENERATION: (json.dumps({"disable_compile": True}, indent=2) + "\n").encode()}


def _obstacles(config: RunConfig) -> list[str]:
    """Return the keys, with their values, that the class does not cover."""
    model, moe, router = config.model, config.moe, config.moe.router
    found = {
        "model.latent": model.latent is not None and json.dumps("given"),
        "model.rotary.scaling": model.rotary.scaling != "none" and model.rotary.scaling,
        "model.rotary.interleaved": model.rotary.interleaved and "true",
        "model.activation": model.activation == UNKNOWN_ACTIVATION and model.activation,
    }
    if moe_layer_numbers(config):
        known = {"scorer": SCORERS, "score_function": SCORE_FUNCTIONS, "selector": SELECTORS}
        for key, names in known.items():
            name = getattr(router, key).name
            found[f"moe.router.{key}.name"] = name not in names and name
        found["moe.router.residual.name"] = router.residual.name != "none" and router.residual.name
        part, options = get_part("selector", router.selector.name), router.selector.options
        learned = "table_TK" in part.requires(options) and "fixed_weights" not in part.provides(options)
        found["moe.router.selector.weights"] = learned and options.weights
        zero = moe.zero_experts.total
        found["moe.zero_experts"] = zero > 0 and str(zero)
        found["moe.output_activation"] = moe.output_activation or False
        found["moe.latent_size"] = moe.latent_size is not None and str(moe.latent_size)
        found["moe.router.capacity.name"] = router.capacity.name != "none" and router.capacity.name
        masks = [mask.name for mask in router.masks if mask.name not in ONLY_IN_TRAINING]
        found["moe.router.masks"] = masks not in ([], [GROUP_LIMIT]) and ", ".join(masks)
        found["moe.expert_activation"] = moe.expert_activation == UNKNOWN_ACTIVATION and UNKNOWN_ACTIVATION
    return [f"{key} {value}" for key, value in found.items() if value]


def _model(config: RunConfig) -> Json:
    """Return the keys of what is not the MoE layers."""
    model = config.model
    scale = math.sqrt(model.hidden_size) if model.scale_embeddings else model.embedding_scale
    return {
        **{name: getattr(model, name) for name in SAME_NAME},
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": value_of(config, "model.num_query_groups"),
        "head_dim": head_size(model),
        "ffn_size": ffn_size(model),
        "rotary_share": model.rotary.share,
        "ffn_bias": model.bias,
        "input_bias": has_input_bias(model),
        "output_bias": has_output_bias(model),
        "query_key_norm": model.attention.query_key_norm,
        "windows": [window_of(model, block) for block in range(1, model.num_layers + 1)],
        "sinks": model.attention.sinks,
        "attention_scale": value_of(config, "model.attention.scale"),
        "attention_soft_cap": model.attention.soft_cap,
        "embedding_scale": scale,
        "tie_word_embeddings": model.tie_embeddings,
    }


def _moe(config: RunConfig) -> Json:
    """Return the keys of the MoE layers; none for a dense model."""
    if not moe_layer_numbers(config):
        return {}
    moe, router, size = config.moe, config.moe.router, expert_ffn_size(config)
    score: Any = router.score_function.options
    return {
        "moe_blocks": [number - 1 for number in moe_block_numbers(config)],
        "inserted_after": [number - 1 for number in inserted_after(config)],
        "num_experts": moe.num_experts,
        "num_experts_per_tok": _num_choices(router.selector),
        "expert_size": size,
        "expert_activation": expert_activation(config),
        "expert_bias": moe.expert_bias,
        "expert_sublayers": moe.expert_sublayers,
        "shared_size": shared_ffn_size(moe, size),
        "shared_mode": moe.shared_expert_mode,
        **loss_weight(0.0).write(config),
        "router": {
            "scorer": SCORERS[router.scorer.name],
            "scorer_options": SCORER_OPTIONS[router.scorer.name](router.scorer.options, config),
            "group_limit": _group_limit(config),
            "score_function": router.score_function.name,
            "score_function_options": {
                "temperature": score.temperature,
                "over": getattr(score, "over", None),
                "has_bias": score.bias_update > 0,
            },
            "selector": SELECTORS[router.selector.name],
            "selector_options": SELECTOR_OPTIONS[router.selector.name](router.selector.options),
        },
    }


def _cosine(options: Any, config: RunConfig) -> Json:
    return {
        "reduction": options.reduction,
        "normalise": options.normalise,
        "routing_dim": options.routing_dim or max(config.moe.num_experts // 2, 2),
        "has_temperature": options.normalise or options.temperature is not None,
    }


SCORER_OPTIONS: dict[str, Callable[[Any, RunConfig], Json]] = {
    "linear": lambda options, config: {"bias": options.bias},
    "noisy": lambda options, config: {},
    "policy": lambda options, config: {},
    "hash": lambda options, config: {"k": config.moe.router.selector.options.k},
    "cosine": _cosine,
}


def _best_k(options: Any) -> Json:
    weights, scale = getattr(options, "weights", "raw"), getattr(options, "scale", 1.0)
    return {"k": getattr(options, "k", 1), "weights": weights, "scale": scale}


SELECTOR_OPTIONS: dict[str, Callable[[Any], Json]] = {
    **dict.fromkeys(("top_k", "sample", "sinkhorn", "balanced"), _best_k),
    "threshold": lambda options: {"threshold": options.eval_threshold or options.threshold},
    "table": lambda options: {"k": options.k, "scale": options.scale},
    "entropy_aware": lambda options: {name: getattr(options, name) for name in ("min_k", "max_k", "weights")},
}


def _group_limit(config: RunConfig) -> Json | None:
    """Return the limit with the number of summed experts filled in, as the mask does it."""
    router = config.moe.router
    limit = next((mask.options for mask in router.masks if mask.name not in ONLY_IN_TRAINING), None)
    if limit is None:
        return None
    best = limit.best or max(_num_choices(router.selector) // limit.keep, 1)
    return {"num_groups": limit.num_groups, "keep": limit.keep, "score": limit.score, "best": best}


def _num_choices(selector: PartChoice) -> int:
    """Return a token's number of experts if it is fixed, otherwise 1, as the selectors declare it."""
    return int(SELECTOR_OPTIONS[selector.name](selector.options).get("k", 1))
