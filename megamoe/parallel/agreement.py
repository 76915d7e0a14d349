"""One answer on every rank: what goes wrong on one of them must end them all alike."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megamoe.errors import UserError


def attempt(action: Callable[[], object]) -> str | None:
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


def from_all_ranks(mine: Any) -> list[Any]:
    """What each rank has; small, picklable."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def first_problem(problem: str | None) -> tuple[int, str] | None:
    """The first rank that has a problem, and what it is: the same answer on all ranks."""
    problems = from_all_ranks(problem)
    return next(((rank, found) for rank, found in enumerate(problems) if found), None)


def agree(problem: str | None) -> None:
    """Return if no rank has a problem.

    Raises:
        UserError: on every rank, with the first rank's problem.
    """
    found = first_problem(problem)
    if found is not None:
        raise UserError(found[1])
