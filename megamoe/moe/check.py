"""Which compositions make sense: every part is asked, before anything is built."""

from collections.abc import Iterator

from megamoe.config import PartChoice
from megamoe.config.schema import MoEConfig
from megamoe.errors import UserError
from megamoe.moe.part import Gate, Part, Restriction, Selector
from megamoe.registry import get_part

BASES = {"restriction": Restriction, "gate": Gate, "selector": Selector}  # of the other kinds: Part


def check_parts(moe: MoEConfig, expert_parallel: int) -> None:
    """Let each part of the layer refuse the company that it is in.

    Raises:
        UserError: the part's key and name, and its reason; or that its class is of another kind.
    """
    for key, choice in chosen_parts(moe):
        part, base = get_part(choice.kind, choice.name), BASES.get(choice.kind, Part)
        if not issubclass(part, base):
            raise UserError(f"{key}: {choice.name}: expected a subclass of megamoe.moe.part.{base.__name__}")
        try:
            if choice.kind == "loss" and not choice.options.weight >= 0:
                raise ValueError(f"weight is {choice.options.weight}, expected at least 0")
            part.check(choice.options, moe, expert_parallel)
        except ValueError as error:
            raise UserError(
                f"{key}: {error}" if choice.kind == "loss" else f"{key}: {choice.name}: {error}"
            ) from None


def chosen_parts(moe: MoEConfig) -> Iterator[tuple[str, PartChoice]]:
    """Every part of the layer with its key in the YAML."""
    router = moe.router
    yield "moe.router.scorer", router.scorer
    for place, choice in enumerate(router.restrictions):
        yield f"moe.router.restrictions.{place}", choice
    yield "moe.router.gate", router.gate
    yield "moe.router.selector", router.selector
    yield "moe.router.capacity", router.capacity
    for name, choice in moe.losses.items():
        yield f"moe.losses.{name}", choice
