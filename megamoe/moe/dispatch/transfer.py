"""One all-to-all of rows with uneven splits, which can run beside other work, forward and backward.

Rows may travel in 8 bits (`to_fp8`). They are encoded once, at the tokens, and decoded once, at the experts;
between the two the tensors of the graph are placeholders of the right shape without memory, and the bytes go
beside them. Gradients always travel in their own dtype.
"""

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megamoe.kernels.autograd import Function, once_differentiable
from megamoe.kernels.choice import Kernels
from megamoe.kernels.experts.rows import RowTokens, gather, sum_rows
from megamoe.moe.dispatch.fp8 import from_fp8, to_fp8
from megamoe.moe.interleaving import in_flight, yield_to_other


@dataclass
class Rows:
    """Rows on their way: values [N, H]; or encoded, uint8 [N, bytes], and values is a placeholder."""

    values: Tensor
    encoded: Tensor | None = None

    @classmethod
    def of(cls, hidden_TH: Tensor, fp8: bool) -> "Rows":
        """Return a row for each token."""
        return cls(hidden_TH, to_fp8(hidden_TH.detach()) if fp8 else None)

    def gathered(self, tokens: RowTokens, kernels: Kernels) -> "Rows":
        """Return the row of each of these tokens; its gradients are summed in fp32."""
        if self.encoded is None:
            return Rows(gather(self.values, tokens, kernels))
        placeholder = _GatherNothing.apply(self.values, tokens, kernels)
        return Rows(placeholder, self.encoded.index_select(0, tokens.token_N))

    def decoded(self) -> Tensor:
        """Return the values."""
        if self.encoded is None:
            return self.values
        return _Decode.apply(self.values, self.encoded)


@dataclass
class Transfer:
    """An all-to-all in its two halves, `start` and `finish`; its gradient is the exchange back.

    What is computed between the halves runs beside the exchange. In the backward pass the same holds in
    reverse: autograd runs nodes in the reverse order of their creation, so the gradient's exchange starts
    before the backward of what was computed between, and is waited for after it.

    sent, received: rows to and from each rank of `group`. interleaves: while the rows travel, the other of
    two micro batches in flight goes on (`yield_to_other`).
    """

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup
    interleaves: bool = False
    encoded: Tensor | None = field(default=None, init=False)  # bytes that arrived, for `finish`
    _beside: bool = field(default=True, init=False, repr=False)
    _work: Any = field(default=None, init=False, repr=False)
    _sending: Tensor | None = field(default=None, init=False, repr=False)
    _arriving: Tensor | None = field(default=None, init=False, repr=False)

    def start(self, rows: Rows) -> Rows:
        """Begin to send rows; the result is for `finish`."""
        return Rows(_Start.apply(rows.values, rows.encoded, self), rows.encoded)

    def finish(self, rows: Rows) -> Rows:
        """Return the rows that arrived, sum(received) of them."""
        values = yield_to_other(rows.values) if self.interleaves else rows.values
        if rows.encoded is None:
            return Rows(_Finish.apply(values, self, False))
        placeholder = _Finish.apply(values, self, True)
        encoded, self.encoded = self.encoded, None
        return Rows(placeholder, encoded)

    def run(self, values: Tensor) -> Tensor:
        """Send values and wait, with nothing of this micro batch beside it: [N, ...] to
        [sum(received), ...].
        """
        self._beside = self.interleaves and in_flight()
        return self.finish(self.start(Rows(values))).values

    def begin(self, rows: Tensor, sent: list[int], received: list[int]) -> None:
        """Start one exchange; both tensors live until it is over."""
        self._sending = rows.contiguous()
        self._arriving = rows.new_empty(sum(received), *rows.shape[1:])
        self._work = dist.all_to_all_single(
            self._arriving, self._sending, received, sent, group=self.group, async_op=self._beside
        )

    def wait(self) -> Tensor:
        """Wait for it, on a GPU without stopping the host; return what arrived."""
        assert self._arriving is not None, "the exchange was not started"
        if self._work is not None:
            self._work.wait()
        arrived, self._work, self._sending, self._arriving = self._arriving, None, None, None
        return arrived


def _placeholder(like: Tensor, rows: int) -> Tensor:
    return like.new_empty(()).expand(rows, *like.shape[1:])


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, encoded: Tensor | None, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.begin(values if encoded is None else encoded, transfer.sent, transfer.received)
        return _placeholder(values, sum(transfer.received))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transfer.wait(), None, None


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, transfer: Transfer, is_encoded: bool) -> Tensor:
        ctx.transfer = transfer
        arrived = transfer.wait()
        if is_encoded:
            transfer.encoded = arrived
            return placeholder.view_as(placeholder)
        return arrived.view_as(arrived)  # an operator, by which a plan knows whose the node is

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        transfer: Transfer = ctx.transfer
        transfer.begin(gradients[0], transfer.received, transfer.sent)
        return gradients[0], None, None


class _GatherNothing(Function):
    """The placeholder of gathered rows; its gradient is that of the gather."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, tokens: RowTokens, kernels: Kernels) -> Tensor:
        ctx.tokens, ctx.kernels = tokens, kernels
        return _placeholder(placeholder, len(tokens.token_N))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NH: Tensor) -> tuple[Tensor, None, None]:
        return sum_rows(gradient_NH.contiguous(), ctx.tokens, ctx.kernels), None, None


class _Decode(Function):
    """Values of encoded rows; the gradient passes to the placeholder unchanged."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, encoded: Tensor) -> Tensor:
        return from_fp8(encoded, placeholder.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
