"""Consensus of the ranks: an error on one rank is raised on all of them, with the same message."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megamoe.errors import UserError

Value = TypeVar("Value")


class CollectiveError(UserError):
    """An error that every rank raises, so that collectives are still possible before the ranks end."""


def catch_error(action: Callable[[], object]) -> str | None:
    """Call `action`; return None, or its error as one line."""
    try:
        action()
    except UserError as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    except Exception as error:  # of any kind: the other ranks wait for the answer
        return f"{type(error).__name__}: {error}"
    return None


def gather_from_ranks(value: Value) -> list[Value]:
    """Return the values of all ranks, in their order, on every rank. For small values, which are pickled."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def first_problem(problem: str | None) -> tuple[int, str] | None:
    """Return the first rank that has a problem, and the problem; None if no rank has one. Collective."""
    problems = gather_from_ranks(problem)
    return next(((rank, found) for rank, found in enumerate(problems) if found), None)


def raise_any_error(problem: str | None) -> None:
    """Raise an error on every rank if any rank has a problem. Collective.

    Raises:
        CollectiveError: on every rank, with the first rank's problem.
    """
    found = first_problem(problem)
    if found is not None:
        raise CollectiveError(found[1])


def call_on_all(action: Callable[[], Value]) -> Value:
    """Return what `action` returns on this rank. Collective.

    Raises:
        CollectiveError: on every rank, if it raises an error on any.
    """
    found: list[Value] = []
    raise_any_error(catch_error(lambda: found.append(action())))
    return found[0]


def largest_of_ranks(values: list[float]) -> list[float]:
    """Return at each place the largest value of all ranks, on every rank. Collective.

    The processes exchange them by gloo: no rank waits for its device. One rank exchanges nothing.
    """
    if dist.get_world_size() == 1:
        return values
    largest = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()


def raise_any_error_fast(problem: str | None) -> None:
    """Do the same as `raise_any_error`, but cheap enough for every step: without a problem one number is
    exchanged, and no rank waits for its device.

    Raises:
        CollectiveError: on every rank, with the first rank's problem.
    """
    if largest_of_ranks([float(problem is not None)]) != [0.0]:
        raise_any_error(problem)
