"""What a mask must know of the parts beside it, and what the losses must know of it."""

from megamoe.config.schema import MoEConfig
from megamoe.moe.part import Dims, Selector
from megamoe.registry import get_part


def experts_wanted(moe: MoEConfig) -> int:
    """How many experts every token wants: the selector's k; where it varies by token, the least."""
    choice = moe.router.selector
    selector: Selector = get_part("selector", choice.name)(choice.options, Dims(1, moe.num_experts))
    return max(selector.num_choices, int(getattr(choice.options, "min_k", 1)))


def most_candidates(moe: MoEConfig) -> int:
    """A bound on the experts that a training step leaves to a token."""
    left = [moe.num_experts]
    for choice in moe.router.masks:
        if choice.name == "expert_dropout":
            left.append(choice.options.num_left(moe.num_experts))
        elif choice.name == "group_limit":
            left.append(moe.num_experts // choice.options.num_groups * choice.options.keep)
        elif choice.name == "entropy_prune" and choice.options.bound == 0:
            left.append(choice.options.num_groups)
    return min(left)


def all_are_step_wide(moe: MoEConfig, or_one_group: bool = False) -> bool:
    """Whether every token of a micro batch has the same candidates; `or_one_group`: or those of one group."""
    return all(
        get_part("mask", choice.name).step_wide
        or (or_one_group and choice.name == "group_limit" and choice.options.keep == 1)
        for choice in moe.router.masks
    )


def is_softmax_over_candidates(moe: MoEConfig) -> bool:
    """Whether the p of a token's candidates sum to 1 whatever the masks took away."""
    score_function = moe.router.score_function
    return score_function.name == "softmax" and score_function.options.over == "candidates"


def refuse_one_candidate(moe: MoEConfig) -> None:
    """ValueError where the router could learn nothing, for every token has one candidate at most."""
    if most_candidates(moe) == 1 and is_softmax_over_candidates(moe):
        raise ValueError(
            "leaves one expert to each token, whose softmax is 1 whatever its score, so that the router gets"
            " no gradient; leave more, or set score_function: sigmoid, or score_function: {name: softmax,"
            " over: all}"
        )


def refuse_twice(name: str, moe: MoEConfig) -> None:
    """ValueError where a mask that draws once a step stands there twice."""
    if sum(choice.name == name for choice in moe.router.masks) > 1:
        raise ValueError(
            f"{name} stands twice in moe.router.masks, and both would make the same draw; keep one"
        )
