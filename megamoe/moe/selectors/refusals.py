"""The company that a selector with a balance of its own cannot keep; every message is one line."""

from megamoe.config.schema import MoEConfig


def refuse_restrictions(moe: MoEConfig, reason: str) -> None:
    """ValueError where there are restrictions."""
    if moe.router.restrictions:
        names = ", ".join(choice.name for choice in moe.router.restrictions)
        raise ValueError(f"found the restrictions {names}, expected none: {reason}; remove them")


def refuse_capacity(moe: MoEConfig, reason: str) -> None:
    """ValueError where there is a capacity."""
    if moe.router.capacity.name != "none":
        raise ValueError(
            f"found the capacity {moe.router.capacity.name!r}, expected none: {reason}; set capacity: none"
        )


def refuse_bias(moe: MoEConfig, reason: str) -> None:
    """ValueError where the gate balances by a bias."""
    bias_update = getattr(moe.router.gate.options, "bias_update", 0.0)
    if bias_update:
        raise ValueError(
            f"found a gate with bias_update {bias_update}, expected 0: {reason}; remove bias_update"
        )


def refuse_other_gates(moe: MoEConfig, reason: str) -> None:
    """ValueError where the gate is not the plain softmax."""
    gate = moe.router.gate
    temperature = getattr(gate.options, "temperature", 1.0)
    if gate.name != "softmax" or temperature != 1:
        found = gate.name if temperature == 1 else f"{gate.name} of temperature {temperature:g}"
        raise ValueError(f"found the gate {found}, expected a plain softmax: {reason}; set gate: softmax")


def refuse_more_than_experts(option: str, wanted: float, moe: MoEConfig) -> None:
    """ValueError where a token would want more experts than there are."""
    if wanted > moe.num_experts:
        raise ValueError(
            f"{option} is {wanted:g}, but there are only {moe.num_experts} experts (moe.num_experts); "
            f"choose {option} <= {moe.num_experts}"
        )
