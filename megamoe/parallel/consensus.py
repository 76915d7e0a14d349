"""One answer on every rank: what goes wrong on one of them must end them all alike."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megamoe.errors import UserError

Value = TypeVar("Value")


class CollectiveError(UserError):
    """Raised by every rank alike, so that they may still do something together before they end."""


def catch_error(action: Callable[[], object]) -> str | None:
    """Do it; None, or what went wrong, in a line."""
    try:
        action()
    except UserError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:  # whatever it is, the other ranks wait to be told
        return f"{type(error).__name__}: {error}"
    return None


def gather_from_ranks(value: Value) -> list[Value]:
    """Each rank's small value, in their order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def first_problem(problem: str | None) -> tuple[int, str] | None:
    """The first rank that has a problem, and what it is: the same answer on all ranks."""
    problems = gather_from_ranks(problem)
    return next(((rank, found) for rank, found in enumerate(problems) if found), None)


def raise_any_error(problem: str | None) -> None:
    """Return if no rank has a problem.

    Raises:
        CollectiveError: on every rank, with the first rank's problem.
    """
    found = first_problem(problem)
    if found is not None:
        raise CollectiveError(found[1])


def raise_any_error_fast(problem: str | None, device: torch.device) -> None:
    """`agree` for every step: where nobody has a problem, one number is summed and no object sent.

    Raises:
        CollectiveError: on every rank, with the first rank's problem.
    """
    if dist.get_world_size() > 1:
        count = torch.tensor([float(problem is not None)], device=device)
        dist.all_reduce(count)
        if float(count) == 0:
            return
    raise_any_error(problem)
