"""The components of tensor parallelism, on the ranks of one world: 4 of them, and 2 and 2."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megamoe.compat.megatron_compat import patch_current_device_for_cpu
from megamoe.kernels.choice import DEFAULT_KERNELS
from megamoe.model.attention.core import SDPAttention
from megamoe.model.build import OneStream, use_one_stream
from megamoe.model.heads.vocabulary import narrow_token_losses, whole_token_losses
from megamoe.moe.token_sharding import TokenSharding
from megamoe.parallel import launch
from megamoe.parallel.gradient_sync import TensorParallelGradientSync
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import start_groups
from tests.support.moe.build import make_context
from tests.support.ranks.pool import Pool

RANKS = 4
SIZES = (2, 4)
SMOOTHINGS = (0.0, 0.1)
S, B, V, T = 3, 2, 16, 8
Found = dict[str, Any]


def every_part() -> dict[int, Found]:
    """Job: by tensor-parallel size, what each part gave on this rank."""
    world = launch.find_world()
    launch.start(world, timeout_minutes=1)
    patch_current_device_for_cpu()
    found = {}
    for size in SIZES:
        layout = Layout(RANKS, tensor=size)
        group = start_groups(layout, timeout_minutes=1).layer.tensor
        place = layout.tensor_rank(world.rank)
        found[size] = {
            "loss": {
                (way, smoothing): spread_loss(place, size, smoothing, way)
                for way in LOSSES
                for smoothing in SMOOTHINGS
            },
            "rows": spread_rows(place, size, group),
            "stream": one_stream(layout.data_rank(world.rank)),
            "sums": {
                accumulation: {dtype: summed(place, group, accumulation, dtype) for dtype in DTYPES}
                for accumulation in (1, 4)
            },
            "left": left_aside(group),
        }
    return found


@pytest.fixture(scope="module")
def ranks(pool: Pool) -> list[dict[int, Found]]:
    return pool.run(every_part, ranks=RANKS)


# The loss, with the vocabulary cut into runs of words.


def loss_problem() -> tuple[Tensor, Tensor, Tensor]:
    """Logits of all words; labels, of which every rank has some; the gradient of the losses."""
    generator = torch.Generator().manual_seed(3)
    logits_SBV = torch.randn(S, B, V, generator=generator) * 3
    return logits_SBV, torch.tensor([[0, 15], [4, 7], [8, 11]]), torch.randn(S, B, generator=generator)


LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "whole": whole_token_losses,
    "narrow": functools.partial(narrow_token_losses, kernels=DEFAULT_KERNELS),
}


def spread_loss(place: int, size: int, smoothing: float, way: str) -> tuple[Tensor, Tensor]:
    logits_SBV, labels_SB, upstream_SB = loss_problem()
    own_SBV = logits_SBV.chunk(size, -1)[place].clone().requires_grad_()
    losses_SB = LOSSES[way](own_SBV * 1, labels_SB, smoothing)
    return losses_SB.detach(), torch.autograd.grad(losses_SB, own_SBV, upstream_SB)[0]


@pytest.mark.parametrize("way", LOSSES)
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("size", SIZES)
def test_the_loss_over_vocabulary_cut_in_pieces(ranks: Any, size: int, smoothing: float, way: str) -> None:
    """Against -sum_v t_v log p_v, in which the other words share the smoothing."""
    logits_SBV, labels_SB, upstream_SB = loss_problem()
    logits_SBV.requires_grad_()
    target_SBV = torch.full((S, B, V), smoothing / (V - 1)).scatter(-1, labels_SB[..., None], 1 - smoothing)
    expected_SB = -(target_SBV * logits_SBV.log_softmax(-1)).sum(-1)
    (gradient_SBV,) = torch.autograd.grad(expected_SB, logits_SBV, upstream_SB)
    found = [rank[size]["loss"][way, smoothing] for rank in ranks]
    for losses_SB, _ in found:
        torch.testing.assert_close(losses_SB, expected_SB.detach(), rtol=1e-5, atol=1e-5)
    for first in range(0, RANKS, size):
        together_SBV = torch.cat([gradient for _, gradient in found[first : first + size]], -1)
        torch.testing.assert_close(together_SBV, gradient_SBV, rtol=1e-5, atol=1e-6)


# A row for each token, spread over ranks and gathered.


def row_problem() -> tuple[Tensor, Tensor]:
    """All rows; the gradient that each rank sends into what was gathered."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(T, 3, generator=generator), torch.randn(RANKS, T, 3, generator=generator)


def spread_rows(place: int, size: int, group: Any) -> Found:
    rows, upstream = row_problem()
    spread = TokenSharding(group)
    own = rows.chunk(size)[place].clone().requires_grad_()
    gathered = spread.all_gather(own)
    gathered.backward(upstream[place])
    numbers = spread.all_gather(torch.arange(T).chunk(size)[place])  # without gradient, of another dtype
    turned = spread.all_gather(rows.chunk(size)[place].T.contiguous().T)  # not contiguous
    nothing = torch.zeros(0, 3, requires_grad=True)  # of a micro batch that is all padding
    none = spread.all_gather(nothing, make_context(bounds=(0,) * (size + 1)))
    none.sum().backward()
    return {
        "place": (spread.rank, spread.size),
        "none": (none.shape, nothing.grad),
        "gathered": gathered.detach(),
        "gradient": own.grad,
        "numbers": numbers,
        "turned": turned,
    }


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_gathered_in_order_and_their_gradients_summed(ranks: Any, size: int) -> None:
    rows, upstream = row_problem()
    for rank, found in enumerate(rank[size]["rows"] for rank in ranks):
        place = rank % size
        assert found["place"] == (place, size)
        assert found["none"][0] == (0, 3) and found["none"][1] is not None
        assert torch.equal(found["gathered"], rows)
        assert torch.equal(found["turned"], rows)
        assert found["numbers"].tolist() == list(range(T))
        expected = upstream[:size].sum(0).chunk(size)[place]
        torch.testing.assert_close(found["gradient"], expected)


# Random numbers.


def one_stream(data_rank: int) -> Found:
    """Job: return draws inside and outside of a fork, and the attention's dropout in forward and
    recomputation.
    """
    use_one_stream()
    stream = OneStream()
    torch.manual_seed(50 + data_rank)
    beside = [torch.rand(4)]
    state = torch.get_rng_state()
    with stream.fork():
        inside = [torch.rand(4)]
        with stream.fork("attention"):
            inside.append(torch.rand(4))
        inside.append(torch.rand(4))
    beside.append(torch.rand(4))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    with stream.fork():
        again = torch.rand(4)
    attention = SDPAttention(SimpleNamespace(attention_dropout=0.5))
    dropped = attention(*(torch.ones(8, 2, 2, 4) for _ in range(3)), None)
    left = torch.get_rng_state()
    attention.eval()(*(torch.ones(8, 2, 2, 4) for _ in range(3)), None)
    assert torch.equal(torch.get_rng_state(), left)  # without dropout nothing is drawn
    return {
        "beside": beside,
        "inside": inside,
        "again": again,
        "states": [after, left],
        "dropped": dropped,
        "initialized": stream.is_initialized(),
    }


@pytest.mark.parametrize("size", SIZES)
def test_tensor_ranks_draw_for_themselves_in_fork_and_alike_beside_it(ranks: Any, size: int) -> None:
    found = [rank[size]["stream"] for rank in ranks]
    drawn = [tuple(draw.tolist()) for one in found for draw in one["inside"]]
    assert len(set(drawn)) == 3 * RANKS
    for rank, one in enumerate(found):
        first = found[rank // size * size]  # of the same micro batch
        assert all(torch.equal(a, b) for a, b in zip(one["beside"], first["beside"], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(one["states"], first["states"], strict=True))
        assert torch.equal(one["again"], one["inside"][0])
        assert one["initialized"]
        assert not set(drawn) & {tuple(draw.tolist()) for draw in one["beside"]}
    dropped = [tuple(one["dropped"].flatten().tolist()) for one in found]
    assert len(set(dropped)) == RANKS
    if size < RANKS:  # other micro batches
        assert not torch.equal(found[0]["beside"][0], found[-1]["beside"][0])


# The sums of what every tensor rank holds whole.

DTYPES = (torch.float32, torch.bfloat16)


class Marked(nn.Module):
    """Two parameters to be summed, one that is not, and one of the marked that takes no gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(4))
        for number, weight in enumerate(self.weights):
            weight.sequence_parallel = number != 2
        self.weights[3].requires_grad_(False)

    def forward(self, factor: float) -> Tensor:
        # The first is used twice: what is summed is the sum of both.
        first, second, alone, frozen = self.weights
        return factor * (first.sum() + 2 * first.sum() + 4 * second.sum() + alone.sum() + frozen.sum())


def summed(place: int, group: Any, accumulation: int, dtype: torch.dtype) -> Found:
    """Gradients after a step, and how many all-reduces there were."""
    model = Marked(dtype)
    sums = TensorParallelGradientSync(model, group)
    calls, real = [], dist.all_reduce

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.dtype)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = noted
    try:
        for micro_batch in range(accumulation):
            sums.last = micro_batch == accumulation - 1
            model(10.0**-micro_batch * (1 + place)).backward()
        sums.check_all_summed()
    finally:
        dist.all_reduce = real
    return {"gradients": [weight.grad for weight in model.weights], "calls": calls}


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("size", SIZES)
def test_one_sum_a_parameter_and_step(ranks: list[dict[int, Found]], size: int, accumulation: int) -> None:
    micro_batches = sum(10.0**-number for number in range(accumulation))
    over_ranks = sum(1 + place for place in range(size))
    for rank, by_dtype in enumerate(rank[size]["sums"][accumulation] for rank in ranks):
        for dtype, found in by_dtype.items():
            assert found["calls"] == [torch.float32] * 2
            first, second, alone, frozen = found["gradients"]
            assert frozen is None
            assert first.dtype == second.dtype == dtype
            # What is summed is rounded to the parameter's dtype once, at the end.
            for gradient, factor in ((first, 3), (second, 4)):
                exact = torch.full((5,), factor * over_ranks * micro_batches)
                if dtype == torch.float32:
                    torch.testing.assert_close(gradient, exact)
                else:
                    torch.testing.assert_close(gradient.float(), exact, rtol=2**-8, atol=0)
            expected = torch.full((5,), (1 + rank % size) * micro_batches)
            torch.testing.assert_close(alone.float(), expected, rtol=2**-7, atol=0)


def left_aside(group: Any) -> str:
    """Job: return the error for a parameter that the last micro batch did not use."""
    model = Marked(torch.float32)
    sums = TensorParallelGradientSync(model, group)
    sums.last = False
    model(1.0).backward()
    sums.last = True
    model.weights[0].sum().backward()
    try:
        sums.check_all_summed()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("size", SIZES)
def test_a_parameter_that_last_micro_batch_left_out_is_error(ranks: Any, size: int) -> None:
    for rank in ranks:
        assert rank[size]["left"].startswith("weights.1 had a gradient in one micro batch of the step, but")
