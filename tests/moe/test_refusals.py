"""What each part refuses in one line, of its options and of the parts beside it, and what it accepts."""

import re
from typing import Any

import pytest
import yaml

from megamoe import registry
from megamoe.config.schema import MoEConfig
from megamoe.errors import UserError
from megamoe.moe.validation import check_parts
from tests.support.moe.build import moe_config

NOISY_LEVELS = ", scorer: {name: hierarchical, noisy: true}"
LEVELS = ", scorer: {name: hierarchical, groups: 2}"
SIGMOID = ", score_function: sigmoid"
BIAS = ", score_function: {bias_update: 0.001}"
HASHED = ", scorer: hash"
DRAWN = ", selector: sample, losses: {grpo: {}}"
TAUGHT = ", losses: {stable_distillation: {}}"
LIMIT = ", masks: [{name: group_limit, keep: 2}]"
NODES = ", masks: [{name: group_limit, num_groups: 4, keep: 2}]"

# Part -> (its options, then what is beside it in the router or in the section `moe`, as YAML; the message as
# a regular expression). There are 16 experts.
Rows = dict[str, list[tuple[str, str]]]
SCORERS: Rows = {
    "scorer cosine": [
        ("{routing_dim: 1}", "routing_dim must be at least 2"),
        ("{temperature: 0.0}", "temperature must be positive"),
        ("{routing_dim: 0, normalise: false}", "routing_dim must be at least 1"),
        ("{routing_dim: 4, reduction: false}", "reduction is false; leave one of them out"),
    ],
    "scorer hash": [
        ("{balance: frequency}, selector: table", "frequency needs counts; give the PREFIX.counts.npy"),
        ("{counts: x.npy}, selector: table", "counts are for balance: frequency only"),
        ("{}", "the selector is 'top_k'.*selector: table$"),
        (
            "{}, selector: table, losses: {z_loss: 0.1}",
            "moe.losses.z_loss has no score to teach; leave it out",
        ),
    ],
    "scorer hierarchical": [
        ("{groups: 0}", "groups must be at least 1"),
        ("{groups: 3}", "groups is 3, .* 16 experts"),
        ("{}" + SIGMOID, "the score function is 'sigmoid'.*softmax$"),
    ],
    "scorer linear": [
        ("{jitter: -0.1}", "jitter must be at least 0 and under 1"),
        ("{jitter: 1.0}", "jitter must be at least 0 and under 1"),
    ],
    "scorer noisy": [("{noise_floor: -0.1}", "noise_floor must be at least 0")],
    "scorer policy": [
        ("{old_every: 0}" + DRAWN, "old_every must be"),
        ("{reference_every: -1}" + DRAWN, "reference_every"),
        ("{}, losses: {grpo: {}}", "the selector is 'top_k'.* set selector: sample"),
        ("{}, selector: sample", "moe.losses lacks one .* add grpo"),
        ("{}" + SIGMOID + DRAWN, "the score function is .*'sigmoid'.* set score_function: {name: softmax"),
        (
            "{}, score_function: {temperature: 2.0}" + DRAWN,
            "the score function is 'softmax', .*set score_function: {name: softmax, temperature: 1.0}",
        ),
    ],
    "scorer stable": [
        ("{phase_1_steps: 0}", "phase_1_steps must be at least 1"),
        ("{routing_dim: 0}", "routing_dim must be"),
        ("{}, losses: {stable_balance: 0.3}", "moe.losses lacks .* add stable_distillation"),
        ("{}, selector: sample" + TAUGHT, "the selector is 'sample'"),
        (
            "{}, selector: {second: sampled}" + TAUGHT,
            "by ranking_TE alone.* set selector: {name: top_k, second: best}",
        ),
        ("{}, masks: [entropy_prune]" + TAUGHT, "the mask 'entropy_prune' .* leave the mask out"),
    ],
}
MASKS: Rows = {
    "mask entropy_prune": [
        ("{bound: -0.1}", "bound must be at least 0"),
        ("{num_groups: 0}", "num_groups must be at least 1"),
        ("{num_groups: 3}", "num_groups is 3, which does not divide the 16 experts"),
        ("{num_groups: 8}", r"the entropy over a group of 2 experts is at most ln 2 = 0.693"),
    ],
    "mask expert_dropout": [
        ("{rate: 0.95}", "rate 0.95 drops 8 of a cluster of 8 experts"),
        ("{rate: 0.05}", "rate 0.05 drops 0 of a cluster of 8 experts"),
        ("{rate: 1.0}", "rate must be at least 0 and under 1"),
        ("{cluster_size: 0}", "cluster_size must be at least 1"),
        ("{cluster_size: 6}", "cluster_size is 6, which does not divide the 16 experts"),
        ("{}, expert_parallel: 4", "parallel.expert 4 puts 4 experts on a rank and would cut a cluster"),
        ("{cluster_size: 16, level: cluster}, expert_parallel: 2", "puts 8 experts on a rank"),
        ("{rate: 0.75}, selector: {k: 5}", "rate 0.75 leaves 4 of 16 experts, but the selector's k is 5"),
    ],
    "mask gating_dropout": [
        ("{rate: 0.0, ranks: 2}", "rate must be above 0 and at most 1"),
        ("{rate: 1.1, ranks: 2}", "rate must be above 0 and at most 1"),
        ("{ranks: 1}", "ranks must be at least 2"),
        ("{}", "parallel.expert is 1, where every expert is at home"),
        ("{ranks: 3}", "ranks is 3, which does not divide the 16 experts"),
    ],
    "mask group_limit": [
        ("{keep: 8}", "keep must be at least 1 and under num_groups 8, found 8"),
        ("{keep: 0}", "found 0"),
        ("{best: 2}", "best is an option of score: sum"),
        ("{score: sum, best: 0}", "best must be at least 1"),
        ("{num_groups: 6}", "num_groups is 6, which does not divide the 16 experts .* one of 2, 4, 8, 16"),
        ("{keep: 2}, selector: {k: 5}", "keep 2 leaves 4 experts in groups of 2, but the selector's k is 5"),
        ("{score: sum, best: 3}, selector: {k: 5}", "best is 3, but a group has 2 experts"),
    ],
}
SCORE_FUNCTIONS: Rows = {
    "score_function relu": [
        ("{}", "the selector is 'top_k', .* weight 0; set selector: {name: above, at_least: 0}$"),
        (
            "{}, selector: {name: above, at_least: 1}",
            "the selector is 'above', .*set selector: {name: above, at_least: 0}$",
        ),
    ],
    "score_function sigmoid": [
        ("{temperature: 0}", "temperature must be positive"),
        ("{temperature: -1.0}", "temperature must be positive"),
        ("{bias_until: 7}", "bias_until needs a bias: set bias_update above 0"),
        ("{bias_update: -0.1}", "bias_update must be at least 0"),
    ],
    "score_function softmax": [
        ("{temperature: 0}", "temperature must be positive"),
        ("{temperature: -1.0}", "temperature must be positive"),
        ("{over: chosen}", "over"),
    ],
}
SELECTORS: Rows = {
    "selector above": [
        ("{value: 0.1, at_least: 17}", "at_least is 17, .* only 16 experts"),
        ("{value: 0.1, mean: 17}", "mean is 17, .* only 16 experts .* mean <= 16$"),
    ],
    "selector balanced": [
        ("{}", "the score function is 'softmax', expected .* its own score alone, .*function: sigmoid$"),
        ("{}, capacity: per_expert" + SIGMOID, "the capacity .* drops nothing, .*set capacity: none$"),
        (
            "{}, score_function: {name: sigmoid, bias_update: 0.001}",
            "the score function 'sigmoid' moves the choice by a bias, .*set score_function.bias_update: 0.0$",
        ),
        (
            "{}, masks: [{name: gating_dropout, ranks: 2}]" + SIGMOID,
            "the mask 'gating_dropout' takes experts away, .*leave the mask out$",
        ),
    ],
    "selector entropy_aware": [
        ("{min_k: 0}", "min_k must be at least 1 and at most max_k"),
        ("{min_k: 3, max_k: 2}", "min_k must be at least 1 and at most max_k"),
        ("{max_k: 1, weights: renormalised}", "with max_k: 1 .* set weights: raw"),
        ("{max_k: 17}", "max_k is 17, .* only 16 experts .* max_k <= 16$"),
    ],
    "selector expert_choice": [
        ("{}, capacity: per_expert", "the capacity is 'per_expert', .* fixed number .*; set capacity: none$"),
        ("{}" + BIAS, "the score function 'softmax' moves the choice by a bias, .*bias_update: 0.0$"),
        ("{k: 16.5}", r"k is 16.5, but there are only 16 experts \(moe.num_experts\); choose k <= 16$"),
        ("{k: 0}", "k must be positive"),
    ],
    "selector hierarchical_top_k": [
        ("{groups: 1}", "groups must be at least 2.*top_k"),
        ("{k: 1}", "k must be at least 2.*top_k"),
        ("{}", "the scorer is 'linear'"),
        ("{groups: 3}" + LEVELS, "2 groups of 8 experts; choose groups <= 2 and k <= 8"),
        ("{k: 9}" + LEVELS, "2 groups of 8 experts; choose groups <= 2 and k <= 8"),
        ("{}" + BIAS + LEVELS, "bias_update: 0.0$"),
    ],
    "selector sample": [
        ("{k: 0}", "k must be at least 1"),
        ("{weights: renormalised}", "with k: 1 the weights 'renormalised' .* set weights: raw"),
        ("{k: 17}", "k is 17, .* only 16 experts .* k <= 16"),
    ],
    "selector sinkhorn": [
        ("{k: 0}", "k must be at least 1"),
        ("{iterations: 0}", "iterations must be at least 1"),
        ("{}" + BIAS, "a bias, .* undo; set score_function.bias_update: 0.0"),
        ("{k: 17}", "k is 17, .* choose k <= 16$"),
    ],
    "selector table": [
        ("{k: 0}" + HASHED, "k must be at least 1"),
        ("{}", "the scorer is 'linear'.*scorer: hash$"),
        ("{}, masks: [expert_dropout]" + HASHED, "the mask 'expert_dropout' takes .*has no o"),
        ("{}" + BIAS + HASHED, "set score_function.bias_update: 0.0"),
    ],
    "selector threshold": [
        ("{threshold: -0.1}", "threshold must be at least 0 and at most 1"),
        ("{threshold: 1.1}", "threshold must be at least 0 and at most 1"),
        ("{eval_threshold: -0.1}", "eval_threshold must be at least 0 and at most 1"),
        ("{eval_threshold: 1.1}", "eval_threshold must be at least 0 and at most 1"),
    ],
    "selector top_k": [
        ("{k: 0}", "k must be at least 1"),
        ("{k: 17}", "k is 17, .* only 16 experts .* k <= 16$"),
        ("{second: random, k: 3}", "second: random is a rule for k: 2, found k: 3; set second: best"),
        ("{renormalise: after_drops, weights: raw}", "needs weights: renormalised, found 'raw'"),
        ("{renormalise: after_drops}", "the capacity 'none' drops nothing, .*after_drops.*set capacity: "),
    ],
}
CAPACITIES: Rows = {
    "capacity device": [
        ("{devices: 0}", "devices must be at least 1"),
        ("{devices: 2, factor: 0}", "must be positive"),
        ("{devices: 2, eval_factor: 0}", "must be positive"),
        ("{devices: 2, spare: 1.0}", "spare must be"),
        ("{devices: 2, spare: -0.1}", "spare must be"),
        ("{devices: 3}", "16 experts .* over 3 devices; choose"),
        ("{}, expert_parallel: 3", "16 experts .* over 3 devices; choose"),
    ],
    "capacity per_expert": [
        ("{factor: 0}", "must be positive"),
        ("{eval_factor: -1}", "must be positive"),
        ("{min_capacity: -1}", "must be at least 0"),
    ],
}
LOSSES: Rows = {
    "loss clustering": [
        ("{cluster_size: 1}", "one expert has no variance"),
        ("{mu: -1.0}", "mu must be at least 0"),
        ("{cluster_size: 3}", "cluster_size is 3, which does not divide the 16 experts"),
        ("{cluster_size: 8}, expert_parallel: 4", "puts 4 experts on a rank and would cut a cluster"),
        ("{cluster_size: 16, mu: 1.0}", "makes one cluster, and mu compares two"),
        (
            "{cluster_size: 8}, masks: [{name: expert_dropout, cluster_size: 4}]",
            "cluster_size is 8, but the mask expert_dropout has clusters of 4",
        ),
    ],
    "loss communication_balance": [
        ("{num_groups: 1}", "num_groups must be at least 2"),
        ("{num_groups: 6}", "num_groups is 6, which does not divide"),
        ("{keep: 0}", "keep must be at least 1 and at most num_groups 8, found 0"),
        ("{keep: 9}", "keep must be at least 1 and at most num_groups 8, found 9"),
        ("{}" + LIMIT, "keep is 3, but the mask group_limit keeps 2 of the 8 groups"),
    ],
    "loss cosine_balance": [
        ("{temperature: 0.0}, scorer: cosine", "temperature must be positive"),
        ("{}", "the scorer is 'linear', expected one that gives cosine_TE, .*set scorer: {name: cosine"),
        (
            "{}, scorer: {name: cosine, normalise: false}",
            "the scorer is 'cosine', expected .* cosine_TE, .* set scorer: {name: cosine, normalise: true}",
        ),
        (
            "{}, scorer: cosine, residual: gating",
            "the residual 'gating' adds the scores of the layer before, .*; take the loss switch_balance; "
            "leave the loss out, or set residual: none$",
        ),
    ],
    "loss device_balance": [
        ("{num_groups: 1}", "num_groups must be at least 2"),
        ("{num_groups: 6}", "num_groups is 6, which does not divide"),
    ],
    "loss grpo": [
        ("{rollouts: 1}", "rollouts must be at least 2"),
        ("{clip: 0.0}", "clip must be above 0 and under 1"),
        ("{clip: 1.0}", "clip must be above 0 and under 1"),
        ("{kl: -0.1}", "kl must be at least 0"),
        ("{}", "the scorer is 'linear'.* set scorer: policy"),
        ("{}, selector: sample", "the scorer is 'linear'.* set scorer: policy"),
    ],
    "loss hierarchical_load": [
        (
            "{}, scorer: hierarchical, selector: hierarchical_top_k",
            "the scorer is 'hierarchical', .*with noise.*set scorer: {name: hierarchical, noisy: true}",
        ),
        (
            "{}, scorer: noisy",
            "the scorer is 'noisy', .*leave the loss out, or set scorer: {name: hierarchical, noisy: true}",
        ),
        ("{}" + NOISY_LEVELS, "the selector is 'top_k', .*set selector: hierarchical_top_k"),
        (
            "{}, selector: {name: hierarchical_top_k, groups: 4, k: 4}" + NOISY_LEVELS,
            "chooses all 16 experts",
        ),
        (
            "{}, selector: hierarchical_top_k, masks: [expert_dropout]" + NOISY_LEVELS,
            "'expert_dropout' takes.* leave the mask out$",
        ),
    ],
    "loss importance": [("{}, selector: {weights: one}", "without gradient.*set selector.weights: ")],
    "loss load": [
        ("{}", "the scorer is 'linear', .*the noise.*set scorer: noisy"),
        ("{}" + NOISY_LEVELS, "expected .*; leave the loss out, or set scorer: noisy"),
        ("{}, scorer: noisy, selector: sample", "the selector is 'sample', .*load is estimated.*: top_k"),
        ("{}, scorer: noisy, selector: {k: 8}, masks: [expert_dropout]", "with k: 8 of 8 experts"),
        (
            "{}, scorer: noisy, selector: {k: 16}",
            "with k: 16 of 16 experts every load is the same; choose moe.router.selector.k < 16",
        ),
    ],
    "loss stable_distillation": [("{}", "the scorer is 'linear'.* set scorer: stable")],
    "loss switch_balance": [
        ("{running: true}", "running: true needs scope: global_batch, found 'micro_batch'"),
        ("{restricted: true}", "restricted: true needs scope: sequence, found 'micro_batch'"),
        ("{scope: sequence, probs: first_choice}", "probs: first_choice is not defined for scope: seq"),
    ],
}
ACCEPTED: dict[str, list[str]] = {
    "scorer hash": ["{}, selector: table", "{}, selector: table, losses: {switch_balance: 0.0}"],
    "scorer hierarchical": ["{}"],
    "scorer policy": ["{}" + DRAWN],
    "scorer stable": ["{}" + TAUGHT, "{}" + LIMIT + TAUGHT],
    "mask expert_dropout": [
        "{}, expert_parallel: 2",
        "{level: global}, expert_parallel: 4",
        "{cluster_size: 2}, expert_parallel: 8",
    ],
    "score_function relu": ["{}, selector: above", "{}, selector: {name: above, value: 0.5, mean: 4}"],
    "selector balanced": ["{}" + SIGMOID],
    "selector expert_choice": ["{allow_non_causal: true}"],
    "selector hierarchical_top_k": ["{}" + LEVELS],
    "selector top_k": ["{renormalise: after_drops}, capacity: per_expert"],
    "capacity device": ["{devices: 3}, num_experts: 9"],
    "loss communication_balance": ["{keep: 2}" + LIMIT, "{}" + NODES],
    "loss clustering": [
        "{cluster_size: 4}, masks: [{name: entropy_prune, num_groups: 8, bound: 0.0}], "
        "selector: {k: 1, weights: raw}"
    ],
    "loss cosine_balance": ["{}, scorer: cosine"],
    "loss hierarchical_load": ["{}, selector: hierarchical_top_k" + NOISY_LEVELS],
    "loss switch_balance": ["{}, scorer: cosine, residual: gating"],
    "loss load": ["{}, scorer: noisy, selector: {k: 2, weights: kept_softmax}, losses: {importance: 0.1}"],
}


REFUSED = {**SCORERS, **MASKS, **SCORE_FUNCTIONS, **SELECTORS, **CAPACITIES, **LOSSES}


def section(part: str, text: str) -> tuple[MoEConfig, int]:
    """Return the section `moe`, and the number of expert-parallel ranks."""
    kind, name = part.split()
    tree: dict[str, Any] = {"num_experts": 16, "losses": {}, **yaml.safe_load(f"{{own: {text}}}")}
    own, ranks = tree.pop("own"), tree.pop("expert_parallel", 1)
    router = {key: tree.pop(key) for key in (*registry.STAGES, "masks") if key in tree}
    if kind == "loss":
        tree["losses"][name] = own
    else:
        router |= {"masks": [{"name": name, **own}]} if kind == "mask" else {kind: {"name": name, **own}}
    return moe_config(**tree, router=router), ranks


@pytest.mark.parametrize(
    ("part", "text", "message"), [(part, *row) for part, table in REFUSED.items() for row in table]
)
def test_it_is_refused_in_one_line(part: str, text: str, message: str) -> None:
    """By its options alone while the YAML is read, and beside other parts before anything is built."""
    kind, name = part.split()
    key = {"loss": f"losses.{name}", "mask": "router.masks.0"}.get(kind, f"router.{kind}")
    with pytest.raises(UserError) as caught:
        check_parts(*section(part, text))
    assert "\n" not in str(caught.value)
    assert re.match(rf"(configuration: )?moe\.{key}(: |\.).*{message}", str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("part", "text"), [(part, text) for part, texts in ACCEPTED.items() for text in texts]
)
def test_it_is_accepted(part: str, text: str) -> None:
    check_parts(*section(part, text))
