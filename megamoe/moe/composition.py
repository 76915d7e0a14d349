"""Checks that the parts of a layer fit together, before anything is built."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from megamoe.config import PartChoice
from megamoe.config.schema import MoEConfig
from megamoe.errors import UserError
from megamoe.moe.compatibility import (
    chosen_parts,
    declared,
    refuse_misfits,
    refuse_one_candidate,
    refuse_same_draw,
)
from megamoe.moe.part import Mask, Part, ScoreFunction, Selector
from megamoe.registry import failure_of, get_part, is_ours

BASES = {"mask": Mask, "score_function": ScoreFunction, "selector": Selector}  # all others: Part


def check_parts(moe: MoEConfig, expert_parallel: int) -> None:
    """Check each part of the layer against the others.

    Raises:
        UserError: the part's key and name, and why it is refused, or that its class is of another kind.
    """
    chosen = list(chosen_parts(moe))
    for key, choice in chosen:
        part, base = get_part(choice.kind, choice.name), BASES.get(choice.kind, Part)
        if not issubclass(part, base):
            raise UserError(f"{key}: {choice.name}: expected a subclass of megamoe.moe.part.{base.__name__}")
        with _with_key(key, choice):
            declared(choice, moe.num_experts)  # raises here, with this part's key, if it cannot say
    for key, choice in chosen:
        with _with_key(key, choice):
            if choice.kind == "loss":
                _check_loss(key.rpartition(".")[2], choice.options)
            refuse_misfits(choice, moe)
            get_part(choice.kind, choice.name).check(choice.options, moe, expert_parallel)
            if choice.kind == "mask":
                refuse_same_draw(choice, moe)
                refuse_one_candidate(choice, moe)
    refuse_late_masks(moe)


@contextmanager
def _with_key(key: str, choice: PartChoice) -> Iterator[None]:
    """Turn what a part's check raises into a UserError with the part's key and name, but for our own bugs."""
    part = get_part(choice.kind, choice.name)
    named = key if key == f"moe.losses.{choice.name}" else f"{key}: {choice.name}"
    try:
        yield
    except ValueError as error:
        raise UserError(f"{named}: {' '.join(str(error).split())}") from None
    except Exception as error:
        if is_ours(part):
            raise
        raise UserError(f"{named}: its check failed{failure_of(part, error)}") from error


def _check_loss(name: str, options: Any) -> None:
    if hasattr(nn.ModuleDict(), name):  # the layer keeps its losses in one
        raise ValueError("modules of PyTorch use this name; choose another")
    if not options.weight >= 0:
        raise ValueError(f"weight is {options.weight}, expected at least 0")


def refuse_late_masks(moe: MoEConfig) -> None:
    """Raise UserError if a step-wide mask comes after one that depends on the token."""
    first: str | None = None
    for place, choice in enumerate(moe.router.masks):
        if not get_part("mask", choice.name).step_wide:
            first = first or choice.name
        elif first is not None:
            raise UserError(
                f"moe.router.masks.{place}: {choice.name}: takes the same experts from all tokens, "
                f"and after {first} might leave a token without any; put it before {first}"
            )
