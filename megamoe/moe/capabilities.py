"""The capabilities that parts declare: what each provides and what it requires of others."""

from megamoe.config import PartChoice
from megamoe.registry import get_part

# Capabilities other than extras, with the words that messages use. A plugin may add its own.
CAPABILITIES = {
    "log_probs": "gives log p as its scores",  # scorer
    "softmax_of_scores": "is a softmax",  # score function
    "plain_softmax": "is a softmax of temperature 1",
    "sums_to_1": "makes the p of a token's candidates sum to 1",
    "monotone": "makes p that grow with the scores of a token",
    "elementwise": "makes the p of an expert from its own score alone",
    "zeros": "makes p of exactly 0",
    "bias": "moves the choice by a bias",
    "mean_experts": "holds the mean number of experts that compute a token",
    "scores_before": "adds the scores of the layer before",  # residual
    "mask": "takes experts away",  # every mask
    "by_probs": "goes by p, not by ranking_TE",  # mask
    "best_k": "chooses a fixed number of the best experts",  # selector
    "by_ranking": "chooses by ranking_TE alone",
    "fixed_count": "gives every token the same number of experts",
    "drawn": "draws the experts",
    "assigned": "solves an assignment of tokens to experts",
    "over_all_ranks": "chooses for the micro batches of all data-parallel ranks together",
    "over_tokens": "lets a token's experts depend on other tokens, in evaluation too",
    "sees_later_tokens": "lets a token's experts depend on later tokens, without allow_non_causal",
    "by_experts": "lets the experts choose, so that a token may get none",
    "may_choose_none": "may leave a token without an expert",
    "even_load": "gives every expert as many tokens",
    "even_first_choices": "gives every expert as many first choices",
    "normalised": "makes the weights of a token sum to 1",
    "fixed_weights": "gives weights without gradient",
    "dropless": "drops nothing",  # capacity
    "fixed_shares": "gives every expert the same number of rows",
}


def capabilities(choice: PartChoice) -> set[str]:
    """Return what a part provides with its options; every mask also provides `mask`."""
    provided: set[str] = get_part(choice.kind, choice.name).provides(choice.options)
    return provided | {choice.kind} if choice.kind == "mask" else provided


def requirements(choice: PartChoice) -> dict[str, str]:
    """Return what a part requires with its options: capability -> reason."""
    found: dict[str, str] = get_part(choice.kind, choice.name).requires(choice.options)
    return found


def provides(capability: str, choice: PartChoice) -> bool:
    """Whether the part has this capability."""
    return capability in capabilities(choice)


def needs(capability: str, kind: str, choice: PartChoice) -> bool:
    """Whether the part is of this kind and requires this capability of another part."""
    return choice.kind == kind and capability in requirements(choice)


def describe(capability: str) -> str:
    """Return a verb phrase for a capability; the message puts the part before it."""
    verb = "gives" if capability[-1:].isupper() else "provides"
    return CAPABILITIES.get(capability, f"{verb} {capability}")
