"""Every metric: its key in metrics.jsonl, W&B and TensorBoard, its unit, its formula, and when it is logged.

Code that writes or reads a metric names it by a constant of this module. `tools/list_keys.py` writes the
tables of docs/run/metrics.md from it. A word in <> stands for a name: `train/<loss>` is a pattern of keys.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A row of docs/run/metrics.md. key: or a pattern of keys. logged: when, or with what."""

    key: str
    unit: str
    formula: str
    logged: str


class Table(list[Metric]):
    """A table of docs/run/metrics.md."""

    def add(self, key: str, unit: str, formula: str, logged: str = "each logged step") -> str:
        """Declare a metric and return its key."""
        self.append(Metric(key, unit, formula, logged))
        return key


EVALUATION = "steps that evaluate"
ACCURACY = "share of the labels, tags, or first and last tokens of answers that have the largest logit"
TIMERS = "`log.timers`"
RANKS = "several ranks"
EXPERT_RANKS = "expert parallelism"

TRAINING = Table()
STEP = TRAINING.add("step", "steps", "optimiser steps since the run's start")
TOKENS = TRAINING.add("tokens", "tokens", "global batch x sequence length, summed since the run's start")
TIME = TRAINING.add("time", "s", "seconds since the epoch")
LM_LOSS = TRAINING.add(
    "train/lm_loss",
    "nats",
    "mean cross entropy of the unmasked tokens; smoothed with `train.label_smoothing`",
)
MTP_LOSS = TRAINING.add(
    "train/lm_loss/mtp_<k>",
    "nats",
    "mean cross entropy of the token k places after the next one, of the same sequence and document",
    "multi-token prediction",
)
LOSS = TRAINING.add(
    "train/loss",
    "nats",
    "`train/lm_loss` + the sum of all `train/<loss>/weighted` + `model.multi_token_prediction.weight` times "
    f"the mean of `{MTP_LOSS}`",
)
AUXILIARY_LOSS = TRAINING.add("train/<loss>", "1", "the loss unweighted, mean over layers and micro batches")
WEIGHTED_LOSS = TRAINING.add(
    "train/<loss>/weighted",
    "nats",
    "weight x the auxiliary loss, mean over micro batches, summed over layers",
)
GRAD_NORM = TRAINING.add("train/grad_norm", "1", "L2 norm of the gradient before clipping")
LR = TRAINING.add("train/lr", "1", "learning rate of the step")
BATCH_SIZE = TRAINING.add("train/batch_size", "sequences", "sequences of the global batch")
LOSS_SCALE = TRAINING.add("train/loss_scale", "1", "the loss scale of the step", "fp16")
SKIPPED_STEPS = TRAINING.add(
    "train/skipped_steps", "steps", "steps not applied since the run's start", "fp16, or after the first one"
)
VAL_LM_LOSS = TRAINING.add(
    "val/lm_loss", "nats", "mean cross entropy of validation data, unsmoothed", EVALUATION
)
SET_LM_LOSS = TRAINING.add("val/<set>/lm_loss", "nats", "loss of each further validation set", EVALUATION)
TEST_LM_LOSS = TRAINING.add("test/lm_loss", "nats", "loss of the third share of `data.split`", "the end")
for _of_set, _when in (("val", EVALUATION), ("val/<set>", EVALUATION), ("test", "the end")):
    TRAINING.add(f"{_of_set}/accuracy", "1", ACCURACY, f"{_when}, with `classification`, `tagging` or `span`")
    TRAINING.add(f"{_of_set}/squared_error", "1", "mean squared error", f"{_when}, with `regression`")

SPEED = Table()
TOKENS_PER_S = SPEED.add("perf/tokens_per_s", "tokens/s", "tokens of the global batch / `perf/step_s`")
STEP_S = SPEED.add("perf/step_s", "s", "duration of the step")
TFLOPS_PER_RANK = SPEED.add(
    "perf/tflops_per_rank",
    "TFLOP/s",
    "(tokens x FLOPs of a token + computed pairs x FLOPs of a pair) / `perf/step_s` / ranks / 10^12",
)
GFLOPS_PER_TOKEN = SPEED.add(
    "perf/gflops_per_token",
    "GFLOP",
    "(tokens x FLOPs of a token + computed pairs x FLOPs of a pair) / tokens of the global batch / 10^9",
)
MFU = SPEED.add("perf/mfu", "1", "`perf/tflops_per_rank` / peak of a rank's device", "known peak")
STAGES = {  # of the MoE layers, by their names in `moe/timers.py`
    "route": SPEED.add("perf/route_s", "s", "forward passes of scorer, masks, selector and capacity", TIMERS),
    "dispatch": SPEED.add("perf/dispatch_s", "s", "rows sorted and sent to the experts", TIMERS),
    "experts": SPEED.add("perf/experts_s", "s", "the routed experts", TIMERS),
    "combine": SPEED.add("perf/combine_s", "s", "rows sent back and summed", TIMERS),
}
OWN_S = SPEED.add(
    "perf/own_s", "s", "median over ranks and steps of a rank's own time ([stragglers](#stragglers))", RANKS
)
SLOWEST_OWN_S = SPEED.add("perf/slowest_own_s", "s", "`perf/own_s` of the slowest rank", RANKS)
SLOWEST_RANK = SPEED.add("perf/slowest_rank", "rank", "the rank with the largest median", RANKS)
STRAGGLERS = SPEED.add("perf/stragglers", "ranks", "the number of ranks that are named as stragglers", RANKS)

LAYERS = Table()  # names within a layer: `of_layer` and `over_layers` make keys of them
LOAD = LAYERS.add("load", "pairs", "n_i, a list over the experts")
IMBALANCE = LAYERS.add("imbalance", "1", "max_i n_i / mean_i n_i; 0 without any pair")
MAX_VIO = LAYERS.add("max_vio", "1", "max_i n_i / mean_i n_i - 1 (Wang et al. 2024, 2408.15664, eq. 4)")
MAX_VIO_RUN = LAYERS.add(
    "max_vio_run", "1", "`max_vio` of all applied steps of the run together; kept in checkpoints"
)
LOAD_CV = LAYERS.add("load_cv", "1", "standard deviation / mean of n_i, over the experts")
DEAD = LAYERS.add("dead", "experts", "experts without a pair in the last `log.dead_window` applied steps")
DROPPED = LAYERS.add("dropped", "1", "1 - pairs computed / pairs chosen by the selector")
EXPERTS_PER_TOKEN = LAYERS.add(
    "experts_per_token", "experts", "mean over tokens of the number of experts that compute the token"
)
WIDTH_HISTOGRAM = LAYERS.add(
    "width_histogram", "tokens", "tokens computed by 0, 1, 2, ... experts, a list without zeros at its end"
)
GATE_ENTROPY = LAYERS.add(
    "gate_entropy", "nats", "mean over tokens of -sum_i q_i ln q_i, q_i = p_i / sum_j p_j over candidates"
)
TOP1_PROB = LAYERS.add("top1_prob", "1", "mean over tokens of max_i q_i")
RANK_LOAD = LAYERS.add(
    "rank_load",
    "pairs",
    "a list over the expert-parallel ranks of the sum of n_i over a rank's experts, over all of their copies",
    EXPERT_RANKS,
)
RANK_IMBALANCE = LAYERS.add(
    "rank_imbalance", "1", "max / mean of `rank_load`: the imbalance of the all-to-all", EXPERT_RANKS
)
RANK_OVERLOAD = LAYERS.add(
    "rank_overload",
    "1",
    "the part of `rank_load` above its mean, summed over ranks / its sum: the share of pairs that an even "
    "load would move",
    EXPERT_RANKS,
)

PARTS = Table()  # of each layer alone, without a mean over layers
LAYER_LOSS = PARTS.add("loss/<loss>", "1", "the layer's auxiliary loss, unweighted, mean over micro batches")
PARTS.add("scorer/temperature", "1", "tau of `cosine` at the step's forward pass")
PARTS.add("scorer/embedding_norm", "1", "mean L2 norm of the experts' rows in the scorer's weight")
PARTS.add(
    "residual/norm", "1", "mean L2 norm of the experts' rows in the residual's weight", "`residual: gating`"
)
PARTS.add("score_function/bias_range", "1", "max_i b_i - min_i b_i", "`bias_update`")
PARTS.add("<part>/<number>", "the part's unit", "what a part of your own returns in `metrics()`")

SHOWN = Table()  # W&B and TensorBoard alone
OVER_LAYERS = SHOWN.add(
    "layers/<name>/<quantile>",
    "of the metric",
    "`min`, `p25`, `median`, `p75` and `max` over layers; of names with a slash `min`, `median` and `max`, "
    "and of the first 16 such names in alphabetical order",
)
LOAD_HISTOGRAM = SHOWN.add(
    "load/histogram", "experts", "experts by load / mean, in 32 bins up to 4; the last has all above"
)
LOAD_QUANTILE = SHOWN.add(
    "load/<quantile>", "1", "quantiles over all experts of all layers of load / mean load of the layer"
)
WIDTHS = SHOWN.add(
    "experts_per_token", "tokens", "the sum of `width_histogram` over layers, up to 32 experts or more"
)

TABLES = (TRAINING, SPEED, LAYERS, PARTS, SHOWN)  # in the order of the page
IN_LAYER = re.compile("moe/([^/]+)/(.+)")  # a layer's name in keys, such as `layer_02`, and the metric's
WORD = re.compile("<[^>]+>")


@cache
def fill(pattern: str, *words: object) -> str:
    """Return the key of a pattern with these words in the places of its <names>, in their order."""
    left = iter(words)
    return WORD.sub(lambda _: str(next(left)), pattern)


@cache
def keys_like(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern's keys; a group has each word. <name> alone may have slashes."""
    named = re.sub("<([^>]+)>", r"(?P<\1>[^/]+)", pattern)
    return re.compile(named.replace("(?P<name>[^/]+)", "(?P<name>.+)"))


class LayerKeys(dict[str, str]):
    """The keys of a layer's metrics by their names in LAYERS and PARTS, each made once."""

    def __init__(self, layer: int | str) -> None:
        self._prefix = f"moe/layer_{layer:02d}/" if isinstance(layer, int) else f"moe/{layer}/"

    def __missing__(self, name: str) -> str:
        return self.setdefault(name, self._prefix + name)


@cache
def of_layer(layer: int | str) -> LayerKeys:
    """Return the keys of a layer. layer: the block's number, or its name in keys, such as `layer_02`."""
    return LayerKeys(layer)


@cache
def over_layers(name: str) -> str:
    """Return the key of the mean over layers (for DEAD the sum) of a metric of LAYERS."""
    return f"moe/{name}"


def of_validation_set(name: str) -> str:
    """Return what the keys of a validation set begin with."""
    return "val" if name == "valid" else f"val/{name}"


@cache
def metric_of(key: str) -> Metric | None:
    """Return the declaration of a key, or None; of several that fit, the most specific."""
    found = IN_LAYER.fullmatch(key)
    tables = [LAYERS, PARTS] if found else [LAYERS] if key.startswith("moe/") else [TRAINING, SPEED, SHOWN]
    name = found[2] if found else key.removeprefix("moe/")
    fitting = (it for table in tables for it in table if keys_like(it.key).fullmatch(name))
    return max(fitting, key=lambda it: len(WORD.sub("", it.key)), default=None)


def validation_key(keys: Iterable[str]) -> str | None:
    """Return the key of the main validation set's loss, else of the first further set by name, else None."""
    found = {key for key in keys if key.startswith("val/")}
    further = sorted(filter(keys_like(SET_LM_LOSS).fullmatch, found))
    return VAL_LM_LOSS if VAL_LM_LOSS in found else next(iter(further), None)


def worst_of_layers(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return the largest value of a metric of the MoE layers, such as IMBALANCE, in a record; None where it
    has none.
    """
    found = (metrics[key] for key in metrics if key.startswith("moe/") and key.endswith(f"/{name}"))
    return max((value for value in found if value is not None), default=None)
