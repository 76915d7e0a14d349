"""The capabilities that parts declare: what each provides and what it requires of others."""

from dataclasses import dataclass

from megamoe.config import PartChoice
from megamoe.config.parts import DEFAULTS
from megamoe.registry import get_part


@dataclass(frozen=True)
class Capability:
    """A capability as messages speak of it: what a part with it does, and the settings that give or take it.

    A plugin may use its own words, without an entry. gives: of `moe.router`. takes: else another part is
    chosen. reader: of an extra that another part must use, the setting of that part.
    """

    verb: str
    gives: str = ""
    takes: str = ""
    reader: str = ""


CAPABILITIES = {
    # of a scorer
    "log_probs": Capability("gives log p as its scores"),
    "clean_TE": Capability("gives clean_TE", "scorer: noisy"),
    "noise_std_TE": Capability("gives noise_std_TE", "scorer: noisy"),
    "cosine_TE": Capability("gives cosine_TE", "scorer: {name: cosine, normalise: true}"),
    "rows_EH": Capability("gives rows_EH", "scorer: {name: linear, rows: true}"),
    "group_scores_TG": Capability("gives group_scores_TG", "scorer: hierarchical"),
    "inner_scores_TE": Capability("gives inner_scores_TE", "scorer: hierarchical"),
    "group_clean_TG": Capability("gives group_clean_TG", "scorer: {name: hierarchical, noisy: true}"),
    "inner_clean_TE": Capability("gives inner_clean_TE", "scorer: {name: hierarchical, noisy: true}"),
    "group_std_TG": Capability("gives group_std_TG", "scorer: {name: hierarchical, noisy: true}"),
    "inner_std_TE": Capability("gives inner_std_TE", "scorer: {name: hierarchical, noisy: true}"),
    "light_TE": Capability("gives light_TE", "scorer: stable", reader="losses.stable_distillation"),
    "phase_1": Capability("provides phase_1", "scorer: stable"),
    "reference_scores_TE": Capability("gives reference_scores_TE", "scorer: policy", reader="losses.grpo"),
    "sampling_scores_TE": Capability("gives sampling_scores_TE", "scorer: policy"),
    "table_TK": Capability("gives table_TK", "scorer: hash", reader="selector: table"),
    # of a score function
    "softmax_of_scores": Capability("is a softmax", "score_function: softmax"),
    "plain_softmax": Capability(
        "is a softmax of temperature 1", "score_function: {name: softmax, temperature: 1.0}"
    ),
    "sums_to_1": Capability(
        "makes the p of a token's candidates sum to 1", "score_function: softmax", "score_function.over: all"
    ),
    "monotone": Capability("makes p that grow with the scores of a token"),
    "elementwise": Capability("makes the p of an expert from its own score alone", "score_function: sigmoid"),
    "zeros": Capability("makes p of exactly 0", "score_function: relu"),
    "bias": Capability("moves the choice by a bias", takes="score_function.bias_update: 0.0"),
    "mean_experts": Capability("holds the mean number of experts that compute a token"),
    # of a residual
    "scores_before": Capability("adds the scores of the layer before", takes="residual: none"),
    # of a mask
    "mask": Capability("takes experts away"),
    "by_probs": Capability("goes by p, not by ranking_TE"),
    # of a selector
    "best_k": Capability("chooses a fixed number of the best experts", "selector: top_k"),
    "by_ranking": Capability("chooses by ranking_TE alone", "selector: {name: top_k, second: best}"),
    "chosen_groups_TA": Capability("gives chosen_groups_TA", "selector: hierarchical_top_k"),
    "threshold_E": Capability(
        "gives threshold_E", "selector: strictly_balanced", reader="losses.batchwise_threshold"
    ),
    "fixed_count": Capability("gives every token the same number of experts"),
    "drawn": Capability("draws the experts", "selector: sample"),
    "assigned": Capability("solves an assignment of tokens to experts"),
    "over_all_ranks": Capability("takes the micro batches of all data-parallel ranks together"),
    "over_tokens": Capability("lets a token's experts depend on other tokens, in evaluation too"),
    "sees_later_tokens": Capability(
        "lets a token's experts depend on later tokens, without allow_non_causal"
    ),
    "by_experts": Capability("lets the experts choose, so that a token may get none"),
    "may_choose_none": Capability(
        "may leave a token without an expert", "selector: {name: above, at_least: 0}"
    ),
    "even_load": Capability("gives every expert as many tokens"),
    "even_first_choices": Capability("gives every expert as many first choices"),
    "normalised": Capability("makes the weights of a token sum to 1"),
    "fixed_weights": Capability("gives weights without gradient", takes="selector.weights: raw"),
    # of a capacity
    "dropless": Capability("drops nothing", "capacity: none", "capacity: per_expert"),
    "fixed_shares": Capability("gives every expert the same number of rows", takes="capacity.pad: false"),
}


def capabilities(choice: PartChoice) -> set[str]:
    """Return what a part provides with its options; every mask also provides `mask`."""
    provided: set[str] = get_part(choice.kind, choice.name).provides(choice.options)
    return provided | {choice.kind} if choice.kind == "mask" else provided


def requirements(choice: PartChoice) -> dict[str, str]:
    """Return what a part requires with its options: capability -> reason."""
    return get_part(choice.kind, choice.name).requires(choice.options)


def provides(capability: str, choice: PartChoice) -> bool:
    """Whether the part has this capability."""
    return capability in capabilities(choice)


def needs(capability: str, kind: str, choice: PartChoice) -> bool:
    """Whether the part is of this kind and requires this capability of another part."""
    return choice.kind == kind and capability in requirements(choice)


def describe(word: str) -> Capability:
    """Return a capability as messages speak of it; a plugin's own word has no settings."""
    return CAPABILITIES.get(word) or Capability(f"{'gives' if word[-1:].isupper() else 'provides'} {word}")


def how_to_remove(choice: PartChoice, word: str) -> str:
    """Return how to do without a capability that this part provides."""
    if describe(word).takes:
        return f"set {describe(word).takes}"
    if choice.kind not in DEFAULTS:
        return f"leave the {choice.kind} out"
    default = DEFAULTS[choice.kind]
    return f"set {choice.kind}: {default}" if default != choice.name else f"choose another {choice.kind}"
