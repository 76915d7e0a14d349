"""The company that a selector with a balance of its own cannot keep; every message is one line."""

from megamoe.config.schema import MoEConfig


def refuse_masks(moe: MoEConfig, reason: str) -> None:
    """ValueError where there are masks."""
    if moe.router.masks:
        names = ", ".join(choice.name for choice in moe.router.masks)
        raise ValueError(f"found the masks {names}, expected none: {reason}; remove them")


def refuse_capacity(moe: MoEConfig, reason: str) -> None:
    """ValueError where there is a capacity."""
    if moe.router.capacity.name != "none":
        raise ValueError(
            f"found the capacity {moe.router.capacity.name!r}, expected none: {reason}; set capacity: none"
        )


def refuse_bias(moe: MoEConfig, reason: str) -> None:
    """ValueError where the score function balances by a bias."""
    bias_update = getattr(moe.router.score_function.options, "bias_update", 0.0)
    if bias_update:
        raise ValueError(
            f"found a score function with bias_update {bias_update}, expected 0: {reason}; remove bias_update"
        )


def refuse_other_score_functions(moe: MoEConfig, reason: str) -> None:
    """ValueError where the score function is not the plain softmax."""
    score_function = moe.router.score_function
    temperature = getattr(score_function.options, "temperature", 1.0)
    if score_function.name != "softmax" or temperature != 1:
        found = (
            score_function.name
            if temperature == 1
            else f"{score_function.name} of temperature {temperature:g}"
        )
        raise ValueError(
            f"found the score function {found}, expected a plain softmax: {reason}; set score_function:"
            " softmax"
        )


def refuse_more_than_experts(option: str, wanted: float, moe: MoEConfig) -> None:
    """ValueError where a token would want more experts than there are."""
    if wanted > moe.num_experts:
        raise ValueError(
            f"{option} is {wanted:g}, but there are only {moe.num_experts} experts (moe.num_experts); "
            f"choose {option} <= {moe.num_experts}"
        )
