"""Causal attention with a sliding window, sinks or soft-capped scores, by PyTorch's operators on any device.

It computes CHUNK queries at a time, over the keys that these may see, and works the scores out again in the
backward pass. So no matrix of S x S exists, but a few of N x CHUNK x keys in fp32, for B sequences and N
heads; with a window, keys are at most CHUNK + window.

Sizes: S positions, B sequences, N query heads, G key heads (P = N / G queries share one), D columns of a
query and key, E of a value, C queries of a chunk, K keys that they may see.
"""

from bisect import bisect_right
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.kernels.attention.documents import Documents
from megamoe.kernels.autograd import Function, once_differentiable

CHUNK = 256  # queries


class Variant(NamedTuple):
    """What causal attention has beside the softmax over a query's own and all earlier positions.

    window: a query sees its own position and the window - 1 before it (Beltagy et al. 2020, 2004.05150).
    soft_cap: c, the scores become c * tanh(scores / c) (Gemma 2, 2408.00118, section 2). sinks_N: a logit of
    each query head that the softmax's denominator has beside the scores (gpt-oss; Xiao et al. 2023,
    2309.17453, is about the same effect); None: no such term.
    """

    window: int | None = None
    soft_cap: float | None = None
    sinks_N: Tensor | None = None

    @property
    def only_window(self) -> bool:
        """Whether the softmax is the usual one, over the keys in the window."""
        return self.soft_cap is None and self.sinks_N is None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing beside the softmax over all earlier positions."""
        return self.only_window and self.window is None


PLAIN = Variant()


def varied_attention(
    query_SBND: Tensor,
    key_SBGD: Tensor,
    value_SBGE: Tensor,
    scale: float | None,
    documents: Documents | None,
    variant: Variant,
) -> Tensor:
    """Compute `causal_attention` of a variant, without rotary positions; return [S, B, N * E]."""
    scale = query_SBND.shape[-1] ** -0.5 if scale is None else scale
    qkv = (query_SBND, key_SBGD, value_SBGE)
    return _VariedAttention.apply(*qkv, variant.sinks_N, scale, documents, variant.window, variant.soft_cap)


def masked_attention(
    query_BNSD: Tensor,
    key_BGLD: Tensor,
    value_BGLE: Tensor,
    visible_B1SL: Tensor,
    scale: float | None,
    variant: Variant,
) -> Tensor:
    """Return the attention of S queries to the L keys that `visible_B1SL` names, [B, N, S, E], in one piece.

    The variant's window is not read: it is part of what is visible.
    """
    scale = query_BNSD.shape[-1] ** -0.5 if scale is None else scale
    groups = key_BGLD.shape[1]
    scores_BGPSL, _ = _scores(query_BNSD.unflatten(1, (groups, -1)), key_BGLD, scale, variant.soft_cap)
    scores_BGPSL = scores_BGPSL.masked_fill(~visible_B1SL[:, :, None], -torch.inf)
    shares_BGPSL = (scores_BGPSL - _log_sum(scores_BGPSL, variant.sinks_N)[..., None]).exp()
    return _over_values(shares_BGPSL.to(value_BGLE.dtype), value_BGLE).flatten(1, 2)


class _VariedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_N: Tensor | None,
        scale: float,
        documents: Documents | None,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        ctx.settings = (scale, documents, window, soft_cap)
        query_BGPSD, key_BGSD, value_BGSE = _by_groups(query, key, value)
        outputs, log_sums = [], []
        for chunk in _chunks(query.shape[1], query.shape[0], documents, window):
            scores, _ = chunk.scores(query_BGPSD, key_BGSD, scale, soft_cap)
            log_sum_BGPC = _log_sum(scores, sinks_N)
            shares = (scores - log_sum_BGPC[..., None]).exp_().to(value.dtype)
            outputs.append(_over_values(shares, value_BGSE[:, :, chunk.keys]))
            log_sums.append(log_sum_BGPC)
        output_BGPSE, log_sum_BGPS = torch.cat(outputs, 3), torch.cat(log_sums, 3)
        ctx.save_for_backward(query, key, value, sinks_N, output_BGPSE, log_sum_BGPS)
        return output_BGPSE.permute(3, 0, 1, 2, 4).flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SBH: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks_N, output_BGPSE, log_sum_BGPS = ctx.saved_tensors
        scale, documents, window, soft_cap = ctx.settings
        query_BGPSD, key_BGSD, value_BGSE = _by_groups(query, key, value)
        gradient_BGPSE = gradient_SBH.unflatten(2, (*output_BGPSE.shape[1:3], -1)).permute(1, 2, 3, 0, 4)
        mean_BGPS = (output_BGPSE * gradient_BGPSE).sum(-1, dtype=log_sum_BGPS.dtype)
        to_queries = []
        to_key, to_value = (
            torch.zeros_like(each, dtype=log_sum_BGPS.dtype) for each in (key_BGSD, value_BGSE)
        )
        for chunk in _chunks(query.shape[1], query.shape[0], documents, window):
            scores, slope = chunk.scores(query_BGPSD, key_BGSD, scale, soft_cap)
            some, keys = chunk.queries, chunk.keys
            shares = (scores - log_sum_BGPS[..., some, None]).exp_()
            sent = gradient_BGPSE[..., some, :]
            to_value[:, :, keys] += _over_queries(shares.to(sent.dtype), sent)
            to_shares = _over_columns(sent, value_BGSE[:, :, keys]).to(shares.dtype)
            to_scores = shares.mul_(to_shares.sub_(mean_BGPS[..., some, None])).mul_(scale)
            to_scores = (to_scores if slope is None else to_scores.mul_(slope)).to(query.dtype)
            to_key[:, :, keys] += _over_queries(to_scores, query_BGPSD[..., some, :])
            to_queries.append(_over_values(to_scores, key_BGSD[:, :, keys]))
        to_query = torch.cat(to_queries, 3).permute(3, 0, 1, 2, 4).flatten(2, 3)
        to_sinks_N = None
        if sinks_N is not None:
            share_BGPS = (sinks_N.view(*log_sum_BGPS.shape[1:3], 1) - log_sum_BGPS).exp()
            to_sinks_N = -(share_BGPS * mean_BGPS).sum((0, 3)).flatten().to(sinks_N.dtype)
        to_key_value = (each.permute(2, 0, 1, 3).to(query.dtype) for each in (to_key, to_value))
        return to_query, *to_key_value, to_sinks_N, None, None, None, None


class _Chunk(NamedTuple):
    """Neighbouring queries and the keys that they may see. start_BC: where their documents begin."""

    queries: slice
    keys: slice
    start_BC: Tensor | None
    window: int | None

    def scores(
        self, query_BGPSD: Tensor, key_BGSD: Tensor, scale: float, soft_cap: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the scores, -inf where a query does not see the key, and the derivative of the soft cap."""
        scores_BGPCK, slope_BGPCK = _scores(
            query_BGPSD[..., self.queries, :], key_BGSD[:, :, self.keys], scale, soft_cap
        )
        place_C1 = torch.arange(self.queries.start, self.queries.stop, device=key_BGSD.device)[:, None]
        place_K = torch.arange(self.keys.start, self.keys.stop, device=key_BGSD.device)
        hidden = place_K > place_C1
        if self.window is not None:
            hidden |= place_K <= place_C1 - self.window
        if self.start_BC is not None:
            hidden = (hidden | (place_K < self.start_BC[:, :, None]))[:, None, None]
        return scores_BGPCK.masked_fill_(hidden, -torch.inf), slope_BGPCK


def _chunks(batch: int, length: int, documents: Documents | None, window: int | None) -> list[_Chunk]:
    found = []
    for first in range(0, max(length, 1), CHUNK):
        last = min(first + CHUNK, length)
        begin = 0 if window is None else max(0, first - window + 1)
        start_BC = None
        if documents is not None:
            start_BC = documents.start_BS[:, first:last]
            places = [first + number * length for number in range(batch)]
            bounds = documents.bounds
            starts = [bounds[bisect_right(bounds, place) - 1] - place + first for place in places]
            begin = max(begin, min(starts, default=0))
        found.append(_Chunk(slice(first, last), slice(begin, last), start_BC, window))
    return found


def _by_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B, G, P, S, D], keys [B, G, S, D] and values [B, G, S, E] of heads in their order."""
    query_BGPSD = query.unflatten(2, (key.shape[2], -1)).permute(1, 2, 3, 0, 4)
    return query_BGPSD, key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3)


def _scores(
    query_BGPCD: Tensor, key_BGKD: Tensor, scale: float, soft_cap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return all scores, in fp32 at least, and the derivative of the soft cap, None without one."""
    wide = torch.promote_types(query_BGPCD.dtype, torch.float32)
    scores = _over_columns(query_BGPCD, key_BGKD).to(wide).mul_(scale)
    if soft_cap is None:
        return scores, None
    capped = (scores / soft_cap).tanh_()
    return capped * soft_cap, 1 - capped.square()


def _log_sum(scores_BGPCK: Tensor, sinks_N: Tensor | None) -> Tensor:
    """Return the logarithm of the softmax's denominator, [B, G, P, C]."""
    log_sum_BGPC = scores_BGPCK.logsumexp(-1)
    if sinks_N is None:
        return log_sum_BGPC
    sinks_GP1 = sinks_N.view(*log_sum_BGPC.shape[1:3], 1).to(log_sum_BGPC.dtype)
    return torch.logaddexp(log_sum_BGPC, sinks_GP1)


def _over_columns(left_BGPCD: Tensor, right_BGKD: Tensor) -> Tensor:
    """[B, G, P, C, D] and [B, G, K, D] -> [B, G, P, C, K]: a key head's queries are rows of one product."""
    count = left_BGPCD.shape[2:4]
    return (left_BGPCD.flatten(2, 3) @ right_BGKD.transpose(2, 3)).unflatten(2, count)


def _over_values(shares_BGPCK: Tensor, value_BGKE: Tensor) -> Tensor:
    """[B, G, P, C, K] and [B, G, K, E] -> [B, G, P, C, E]."""
    return (shares_BGPCK.flatten(2, 3) @ value_BGKE).unflatten(2, shares_BGPCK.shape[2:4])


def _over_queries(shares_BGPCK: Tensor, sent_BGPCE: Tensor) -> Tensor:
    """[B, G, P, C, K] and [B, G, P, C, E] -> [B, G, K, E], summed over the queries that share the head."""
    return shares_BGPCK.flatten(2, 3).transpose(2, 3) @ sent_BGPCE.flatten(2, 3)
