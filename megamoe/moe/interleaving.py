"""Two micro batches in flight: their passes take turns, so that one computes while the other's rows travel.

Each forward pass has a thread of its own, and one of the two threads runs at a time. A pass hands its turn
over where an exchange between ranks was started (`yield_to_other`). So the passes call the collectives in one
order, the same on all ranks.

One backward pass over both graphs takes the same turns in reverse, and each graph's nodes run in the order of
its own backward pass: autograd runs the ready node that was made last, by its number. Each thread numbers
its nodes by itself, so a thread whose turn begins goes on with the number at which the other one stopped.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megamoe.compat.torch_compat import next_node_number, raise_node_numbers
from megamoe.kernels.autograd import Function


class Interleaving:
    """The turns of two passes, the first and the second.

    leave: returns what belongs to the pass that hands over; enter: puts it back before the pass goes on.
    enter_backward: called with the pass's place, 0 or 1, when its turn in the backward pass begins.
    """

    def __init__(
        self, leave: Callable[[], Any], enter: Callable[[Any], None], enter_backward: Callable[[int], None]
    ) -> None:
        self._leave, self._enter, self._enter_backward = leave, enter, enter_backward
        self._mine = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = [False, False]
        self._failed = False
        self._number = 1  # of the next node of the graphs

    def run(self, first: Callable[[], None], second: Callable[[], None], device: torch.device) -> None:
        """Run both passes, the first one in this thread; return when both are over.

        What `leave` returns at the end of the first pass is in place afterwards.

        Raises:
            Exception: what one of the passes has raised; the other one is given up.
        """
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        threads = torch.get_num_threads()

        def in_second_thread() -> None:
            torch.set_num_threads(threads)
            self._mine[1].acquire()
            if self._failed:
                return
            if stream is None:
                self._pass(1, second)
            else:
                with torch.cuda.device(device), torch.cuda.stream(stream):
                    self._pass(1, second)

        other = _second_thread().submit(in_second_thread)
        try:
            self._pass(0, first)
            state = self._leave()
        except _GivenUp:
            pass  # the second pass has failed, and its error follows
        finally:
            self._mine[1].release()
            error = other.exception()
        if error is not None:
            raise error
        self._enter(state)

    def _pass(self, place: int, function: Callable[[], None]) -> None:
        _own.turn = self, place
        try:
            raise_node_numbers(self._number)
            function()
        except BaseException:
            self._failed = True
            raise
        finally:
            _own.turn = None
            self._number = next_node_number()
            self._is_over[place] = True
            if place == 1:
                self._mine[0].release()

    def end(self, place: int, values: Tensor) -> Tensor:
        """Let the other pass go on, if it is not over; return when it hands over or is over.

        values: of the graph; returned with a node that begins this turn in the backward pass.
        """
        ended: Tensor = _Yield.apply(values, self._enter_backward, place)
        if self._is_over[1 - place]:
            return ended
        state, self._number = self._leave(), next_node_number()
        self._mine[1 - place].release()
        self._mine[place].acquire()
        if self._failed:
            raise _GivenUp
        raise_node_numbers(self._number)
        self._enter(state)
        return ended


class _GivenUp(Exception):
    """Ends a pass when the other one has failed."""


class _Own(threading.local):
    turn: tuple[Interleaving, int] | None = None  # and this thread's place in them


_own = _Own()


def in_flight() -> bool:
    """Return whether this thread's pass takes turns with another one."""
    return _own.turn is not None


def yield_to_other(values: Tensor) -> Tensor:
    """Let the other micro batch in flight go on; return the values when it is this one's turn again.

    An exchange that was started before this call is sent meanwhile. In the backward pass the same holds for
    the exchange of a gradient: the nodes after this call start it, and the nodes before this call wait for
    it. Without another micro batch in flight the function does nothing.
    """
    if _own.turn is None:
        return values
    turns, place = _own.turn
    return turns.end(place, values)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context of a recomputation, which is one whole part of its pass: no turn ends in it."""
    turn, _own.turn = _own.turn, None
    try:
        yield
    finally:
        _own.turn = turn


class _Yield(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, begin: Callable[[int], None], place: int) -> Tensor:
        ctx.begin, ctx.place = begin, place
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.begin(ctx.place)
        return gradients[0], None, None


@cache
def _second_thread() -> ThreadPoolExecutor:
    """Return the thread of second passes; it stays, with its libraries' workspaces."""
    return ThreadPoolExecutor(1, thread_name_prefix="second micro batch")
