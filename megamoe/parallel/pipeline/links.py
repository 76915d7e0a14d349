"""What neighbouring pipeline stages send each other: hidden states forward, their gradients backward."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.errors import is_lost_contact


@dataclass
class _Link:
    """A directed link between two ranks, with a process group of its own.

    gloo matches the messages of two ranks by tag, NCCL by order. On NCCL, sends and receives of one group
    wait for each other in their order; with a group for each link no send waits for another link's receive.
    """

    peer: int
    peer_stage: int
    group: dist.ProcessGroup


@dataclass
class StageLinks:
    """This rank's links to the stage before and the stage after, each in both directions.

    With several chunks the first stage follows the last. stage, stages: this rank's stage, and their number.
    forward_in, forward_out: hidden states from the stage before, and to the one after. backward_in,
    backward_out: gradients from the stage after, and to the one before.
    """

    stage: int
    stages: int
    forward_in: _Link
    forward_out: _Link
    backward_in: _Link
    backward_out: _Link
    _under_way: list[tuple[Any, Tensor]] = field(default_factory=list)

    @classmethod
    def make(cls, columns: list[list[int]], make: Callable[[list[int]], Any]) -> "StageLinks":
        """Create all links of all columns of ranks, one rank of each stage; collective over all ranks."""
        own: dict[str, Any] = {}
        rank, stage, stages = dist.get_rank(), 0, len(columns[0])
        for column in columns:
            for sender in range(stages):
                receiver = (sender + 1) % stages
                for way, (start, end) in (("forward", (sender, receiver)), ("backward", (receiver, sender))):
                    group = make(sorted((column[start], column[end])))
                    if column[start] == rank:
                        own[f"{way}_out"] = _Link(column[end], end, group)
                    if column[end] == rank:
                        own[f"{way}_in"] = _Link(column[start], start, group)
            if rank in column:
                stage = column.index(rank)
        return cls(stage, stages, **own)

    def send_forward(self, hidden: Tensor) -> None:
        """Send hidden states to the next stage; returns at once and keeps the tensor until it has left."""
        self._send(hidden, self.forward_out)

    def send_backward(self, gradient: Tensor) -> None:
        """Send a gradient to the stage before; returns at once."""
        self._send(gradient, self.backward_out)

    def receive_forward(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the hidden states from the stage before.

        Raises:
            ConnectionError: naming the stage, if its connection closes, or nothing comes within the time
                limit of the group.
        """
        return self._receive(shape, dtype, device, self.forward_in, "hidden states")

    def receive_backward(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the gradient of hidden states from the stage after; raises as `receive_forward` does."""
        return self._receive(shape, dtype, device, self.backward_in, "a gradient")

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _send(self, tensor: Tensor, link: _Link) -> None:
        for work, _ in self._under_way:
            if work.is_completed():
                work.wait()  # the memory can be used again on this stream
        self._under_way = [(work, kept) for work, kept in self._under_way if not work.is_completed()]
        tensor = tensor.contiguous()
        self._under_way.append((dist.isend(tensor, link.peer, group=link.group), tensor))

    def _receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, link: _Link, what: str
    ) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        try:
            dist.recv(tensor, link.peer, group=link.group)
        except RuntimeError as error:
            if not is_lost_contact(error):
                raise
            raise ConnectionError(
                f"pipeline stage {self.stage} of {self.stages} waited in vain for {what} from stage "
                f"{link.peer_stage} (rank {link.peer}): connection closed or timed out waiting"
            ) from error
        return tensor
