"""Checks that the parts of a layer fit together, by what they declare (`part.Part`), before anything is
built.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from megamoe.config import PartChoice
from megamoe.config.schema import MoEConfig
from megamoe.config.shapes import routed_experts
from megamoe.errors import Problem, raise_first
from megamoe.moe.capabilities import capabilities, describe, how_to_remove, needs, provides, requirements
from megamoe.moe.part import Candidates, Mask, Part, Residual, ScoreFunction, Selector
from megamoe.registry import failure_of, get_part, is_ours, label


def chosen_parts(moe: MoEConfig) -> Iterator[tuple[str, PartChoice]]:
    """Yield every part of the layer with its key in the YAML."""
    router = moe.router
    yield "moe.router.scorer", router.scorer
    yield "moe.router.residual", router.residual
    for place, choice in enumerate(router.masks):
        yield f"moe.router.masks.{place}", choice
    yield "moe.router.score_function", router.score_function
    yield "moe.router.selector", router.selector
    yield "moe.router.capacity", router.capacity
    for name, choice in moe.losses.items():
        yield f"moe.losses.{name}", choice


def declared(choice: PartChoice, num_experts: int) -> set[str]:
    """Return everything that a part provides and requires; raises whatever its methods raise."""
    if choice.kind == "mask":
        candidates_of(choice, num_experts)
    return capabilities(choice) | requirements(choice).keys()


def provider(moe: MoEConfig, word: str) -> PartChoice | None:
    """Return the first part of the layer that provides this capability, or None."""
    return next((choice for _, choice in chosen_parts(moe) if provides(word, choice)), None)


def size_of_extra(moe: MoEConfig, name: str) -> int:
    """Return the size of an extra's last dimension, as the part that provides it declares.

    Raises:
        ValueError: if no part provides the extra, or its part does not declare the size.
    """
    choice, letter = provider(moe, name), name[-1]
    sizes = (
        {} if choice is None else get_part(choice.kind, choice.name).sizes(choice.options, moe.num_experts)
    )
    if letter not in sizes:
        raise ValueError(f"no part declares the size {letter} of {name}; add it to the part's `sizes`")
    return int(sizes[letter])


def candidates_of(choice: PartChoice, num_experts: int, expert_parallel: int = 1) -> Candidates:
    """Return the candidates that a mask leaves."""
    return get_part("mask", choice.name).num_candidates(choice.options, num_experts, expert_parallel)


def experts_wanted(moe: MoEConfig) -> int:
    """Return the number of experts that every token wants: the selector's k, or the least if it varies."""
    choice = moe.router.selector
    return int(get_part("selector", choice.name).wanted(choice.options, moe.num_experts))


def _left_by(masks: list[PartChoice], num_experts: int) -> list[Candidates]:
    """Return the candidates that the masks leave, those of the same groups together."""
    found: dict[int, Candidates] = {}
    for choice in masks:
        left = candidates_of(choice, num_experts)
        found[left.groups] = left.and_also(found.get(left.groups, left))
    return [*found.values()]


def most_candidates(moe: MoEConfig) -> int:
    """Return an upper bound on a token's candidates in a training step."""
    found = _left_by(moe.router.masks, moe.num_experts)
    return min([moe.num_experts, *(left.most for left in found)])


def all_are_step_wide(moe: MoEConfig, or_one_group: bool = False) -> bool:
    """Whether every token of a micro batch has the same candidates, or (`or_one_group`) one whole group."""
    by_token = [choice for choice in moe.router.masks if not get_part("mask", choice.name).step_wide]
    left = _left_by(by_token, moe.num_experts)
    return all(or_one_group and candidates.one_group for candidates in left)


def sums_to_1(moe: MoEConfig) -> bool:
    """Whether the p of a token's candidates sum to 1 under every mask."""
    return provides("sums_to_1", moe.router.score_function)


def choice_of(moe: MoEConfig, kind: str) -> PartChoice | None:
    """Return the layer's part of a stage; None for a kind that may occur several times."""
    return next((choice for key, choice in chosen_parts(moe) if key == f"moe.router.{kind}"), None)


def refuse_misfits(choice: PartChoice, moe: MoEConfig) -> None:
    """Raise ValueError if a part lacks what it requires, or if another part provides what it refuses."""
    part = get_part(choice.kind, choice.name)
    leave_out = "leave the loss out, or " if choice.kind == "loss" else ""
    for word, why in requirements(choice).items():
        if provider(moe, word) is None:
            raise ValueError(_lack(describe(word).gives, describe(word).verb, why, moe, leave_out))
    for word, why in part.refuses(choice.options).items():
        found = provider(moe, word)
        if found is not None:
            named = f"the {label(found.kind)} {found.name!r} {describe(word).verb}"
            raise ValueError(f"{named}, {why}; {leave_out}{how_to_remove(found, word)}")
    others = [other for _, other in chosen_parts(moe)]
    for (kind, word), why in part.must_be_required(choice.options).items():
        if not any(needs(word, kind, other) for other in others):
            raise ValueError(_lack(describe(word).reader, f"makes use of {word}", why, moe, leave_out))


def _lack(setting: str, what: str, why: str, moe: MoEConfig, leave_out: str) -> str:
    """Return the message: no part of the layer does what is needed; the setting names one that does."""
    if not setting:
        return f"no part {what}, {why}; {leave_out}name a plugin with such a part in plugins"
    current = choice_of(moe, setting.partition(":")[0])
    if current is None:
        listed, _, name = setting.partition(".")
        return f"moe.{listed} lacks one that {what}, {why}; {leave_out}add {name or 'one'}"
    kind = label(current.kind)
    return f"the {kind} is {current.name!r}, expected one that {what}, {why}; {leave_out}set {setting}"


def refuse_one_candidate(choice: PartChoice, moe: MoEConfig) -> None:
    """Raise ValueError if the router could not learn because a mask leaves each token one candidate."""
    if candidates_of(choice, moe.num_experts).most == 1 and sums_to_1(moe):
        raise ValueError(
            "leaves one expert to each token, whose p is 1 whatever its score, so that the router gets no "
            "gradient; leave more, or set score_function: sigmoid"
        )


def refuse_alike(choice: PartChoice, moe: MoEConfig) -> None:
    """Raise ValueError if a part takes experts that compute and experts that do not to be alike.

    A balance loss may, where the score function holds the mean number of experts that compute.
    """
    zero = moe.zero_experts.total
    if zero == 0 or not get_part(choice.kind, choice.name).experts_alike:
        return
    is_loss = choice.kind == "loss"
    if is_loss and provider(moe, "mean_experts") is not None:
        return
    way_out = (
        "leave it out" if choice.kind in ("mask", "loss") else f"choose another moe.router.{choice.kind}"
    )
    hold = (
        ", take the loss heterogeneous_balance, or hold the mean number of experts that compute by "
        "moe.router.score_function.mean_experts"
    )
    raise ValueError(
        f"takes all {moe.num_experts} experts to be alike, but {zero} of them compute nothing "
        f"(moe.zero_experts); {way_out}{hold if is_loss else ''}"
    )


def refuse_same_draw(choice: PartChoice, moe: MoEConfig) -> None:
    """Raise ValueError if a mask that draws once a step is configured twice."""
    same = [other for other in moe.router.masks if other.name == choice.name]
    if get_part("mask", choice.name).random and len(same) > 1:
        raise ValueError(
            f"{choice.name} stands twice in moe.router.masks, and both would make the same draw; keep one"
        )


def refuse_more_than_experts(option: str, wanted: float, moe: MoEConfig) -> None:
    """Raise ValueError if a token would want more experts than there are."""
    if wanted > moe.num_experts:
        raise ValueError(
            f"{option} is {wanted:g}, but there are only {moe.num_experts} experts (moe.num_experts); "
            f"choose {option} <= {moe.num_experts}"
        )


def refuse_all_chosen(moe: MoEConfig, first_choice: bool = False, by_candidates: bool = True) -> None:
    """Raise ValueError if every token chooses all of its candidates, and all tokens have the same ones.

    The counts are then even whatever the router learns, and a loss that balances them has no effect.
    by_candidates: the loss takes p over the candidates. These p also sum to 1 if each token has one group of
    experts, so the gradient is 0 if the counts are even in each group; and p is 1 if there is one candidate.
    """
    choice, most = moe.router.selector, most_candidates(moe)
    one_each = by_candidates and most == 1
    if not one_each and (first_choice or not all_are_step_wide(moe, or_one_group=by_candidates)):
        return
    if get_part("selector", choice.name).takes_all(choice.options, most):
        _refuse_even("sends every token to every expert that it may choose")


def refuse_even_selector(moe: MoEConfig, first_choice: bool = False) -> None:
    """Raise ValueError if the selector itself makes the counts of a micro batch even."""
    if ("even_first_choices" if first_choice else "even_load") in capabilities(moe.router.selector):
        _refuse_even("gives every expert as many tokens")


def refuse_all_largest(moe: MoEConfig) -> None:
    """Raise ValueError if the k largest gating values are those of all experts."""
    if experts_wanted(moe) >= moe.num_experts:
        _refuse_even(f"wants all {moe.num_experts} experts for every token")


def _refuse_even(what: str) -> None:
    raise ValueError(
        f"the selector {what}, so that their counts are even whatever the router does, and the loss "
        "teaches nothing; leave it out, or choose another moe.router.selector"
    )


LAYER_LOSSES = ("dims", "objective", "objectives", "weights")
BASES = {  # all others: Part
    "residual": Residual,
    "mask": Mask,
    "score_function": ScoreFunction,
    "selector": Selector,
}


def check_parts(moe: MoEConfig, expert_parallel: int) -> None:
    """Raise UserError with the first of `part_problems`."""
    raise_first(part_problems(moe, expert_parallel))


def part_problems(moe: MoEConfig, expert_parallel: int) -> Iterator[Problem]:
    """Check each part of the layer against the others; yield the first problem of each.

    The checks see the number of experts that the router chooses among as `num_experts`; the last
    `zero_experts.total` of them compute nothing. If a part cannot say what it provides and requires, or its
    class is of another kind, the parts are not compared.
    """
    moe = replace(moe, num_experts=routed_experts(moe))
    chosen = list(chosen_parts(moe))
    declaring = [problem for key, choice in chosen if (problem := _problem(key, choice, _declare, moe))]
    yield from declaring
    if declaring:
        return
    for key, choice in chosen:
        if problem := _problem(key, choice, _compare, moe, key, expert_parallel):
            yield problem
    yield from late_mask_problems(moe)


def _declare(choice: PartChoice, moe: MoEConfig) -> None:
    base = BASES.get(choice.kind, Part)
    if not issubclass(get_part(choice.kind, choice.name), base):
        raise ValueError(f"expected a subclass of megamoe.moe.part.{base.__name__}")
    declared(choice, moe.num_experts)  # raises here, with this part's key, if it cannot say


def _compare(choice: PartChoice, moe: MoEConfig, key: str, expert_parallel: int) -> None:
    if choice.kind == "loss":
        _check_loss(key.rpartition(".")[2], choice.options)
    refuse_misfits(choice, moe)
    refuse_alike(choice, moe)
    get_part(choice.kind, choice.name).check(choice.options, moe, expert_parallel)
    if choice.kind == "mask":
        refuse_same_draw(choice, moe)
        refuse_one_candidate(choice, moe)


def _problem(key: str, choice: PartChoice, check: Callable[..., None], *arguments: Any) -> Problem | None:
    """Return what a check of a part raises, under the part's key and name; our own bugs are raised."""
    part = get_part(choice.kind, choice.name)
    named = "" if key == f"moe.losses.{choice.name}" else f"{choice.name}: "
    try:
        check(choice, *arguments)
    except ValueError as error:
        return Problem(key, f"{named}{' '.join(str(error).split())}")
    except Exception as error:
        if is_ours(part):
            raise
        return Problem(key, f"{named}its check failed{failure_of(part, error)}")
    return None


def _check_loss(name: str, options: Any) -> None:
    if hasattr(nn.ModuleDict(), name) or name in LAYER_LOSSES:  # `AuxiliaryLosses` has these attributes
        raise ValueError("modules of PyTorch use this name; choose another")
    if not options.weight >= 0:
        raise ValueError(f"weight is {options.weight}, expected at least 0")


def late_mask_problems(moe: MoEConfig) -> Iterator[Problem]:
    """Yield the step-wide masks that come after one that depends on the token."""
    first: str | None = None
    for place, choice in enumerate(moe.router.masks):
        if not get_part("mask", choice.name).step_wide:
            first = first or choice.name
        elif first is not None:
            yield Problem(
                f"moe.router.masks.{place}",
                f"{choice.name}: takes the same experts from all tokens, and after {first} might leave a "
                f"token without any; put it before {first}",
            )
