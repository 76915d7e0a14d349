"""Counts that are even whatever the router learns: a loss that balances them teaches nothing."""

from megamoe.config.schema import MoEConfig
from megamoe.moe.masks.compatibility import all_are_step_wide, experts_wanted, most_candidates


def refuse_all_chosen(moe: MoEConfig, first_choice: bool = False, by_candidates: bool = True) -> None:
    """ValueError where every token wants every expert that is open to it, and all have the same ones.

    by_candidates: the loss takes p over the candidates, which sum to 1 in a token's only group too, so that
    its gradient is 0 where the counts are even in each group; and p is 1 where there is one candidate.
    """
    choice, most = moe.router.selector, most_candidates(moe)
    one_each = by_candidates and most == 1
    if not one_each and (first_choice or not all_are_step_wide(moe, or_one_group=by_candidates)):
        return
    sent = getattr(choice.options, "second", "best") != "random"
    threshold_1 = choice.name == "threshold" and choice.options.threshold == 1
    if threshold_1 or (sent and experts_wanted(moe) >= most):
        _refuse("sends every token to every expert that it may choose")


def refuse_even_selector(moe: MoEConfig, first_choice: bool = False) -> None:
    """ValueError where the selector itself makes the counts of a micro batch even."""
    name = moe.router.selector.name
    if name == "balanced" or (name == "expert_choice" and not first_choice):
        _refuse("gives every expert as many tokens")


def refuse_all_largest(moe: MoEConfig) -> None:
    """ValueError where the k largest gating values are those of all experts."""
    if experts_wanted(moe) >= moe.num_experts:
        _refuse(f"wants all {moe.num_experts} experts for every token")


def _refuse(what: str) -> None:
    raise ValueError(
        f"the selector {what}, so that their counts are even whatever the router does, and the loss "
        "teaches nothing; leave it out, or choose another moe.router.selector"
    )
