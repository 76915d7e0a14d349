"""Megatron-Core's process groups: which of them are made."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from megatron.core import parallel_state

from megamoe.compat import replaced


@contextmanager
def groups_made_by(make: Callable[[Sequence[int], timedelta | None], Any]) -> Iterator[None]:
    """Inside, `initialize_model_parallel` takes each process group from make(ranks, timeout).

    Reason: Megatron-Core makes a group for each of its 17 purposes (contexts, pipelines, its own experts, its
        own distributed optimizer), also where the ranks are those of another group, and though the model
        here communicates over two of them.
    Seen with: Megatron-Core 0.16.1.
    Without it: it makes 94 groups at 8 ranks, and NCCL a communicator for each of them.
    Canary: test_megatron_groups.py::test_a_group_for_each_purpose
    """

    def create_group(
        ranks: Sequence[int], timeout: timedelta | None = None, *unused: Any, **also_unused: Any
    ) -> Any:
        return make(ranks, timeout)

    with replaced(parallel_state, create_group=create_group):
        yield
