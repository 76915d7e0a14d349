"""Section `kernels`: every kernel of ours beside its plain form, and tiles beside those of the table."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.findings import Machine, Section, Skip
from gpu.rates import seconds_of, uneven_counts
from megamoe.kernels.attention.rotary import Rotary, apply_rotary, apply_rotary_qk
from megamoe.kernels.choice import Kernels, triton_problem
from megamoe.kernels.cross_entropy import Sums, Target, statistics, write_gradient
from megamoe.kernels.experts.ffn import swiglu_experts
from megamoe.kernels.experts.rows import RowTokens, combine, gather, group_pairs, swiglu
from megamoe.kernels.rms_norm import rms_norm, summed_rms_norm
from megamoe.kernels.router import balance, gate_sums, mean_squared_log_sum, renormalised_weights
from megamoe.kernels.router import scores as router_scores

PLAIN = Kernels(compiled=False, triton=False)
ROTARY = Rotary(10000.0)
# Of the largest number: sums in another order, and in bf16 and fp16 a rounding of each result.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
# Tokens, hidden size, FFN size, experts, choices, heads.
SIZES = {"cuda": (8192, 1024, 1376, 16, 2, 16), "cpu": (64, 32, 48, 4, 2, 2)}
WORDS = 1000
DTYPES = {"cuda": (torch.float32, torch.bfloat16, torch.float16), "cpu": (torch.float32,)}

Call = Callable[..., Tensor]


@dataclass(frozen=True)
class Pass:
    """A pass: a function of its inputs and the choice of kernels, and its inputs, which have gradients."""

    name: str
    call: Call
    inputs: tuple[Tensor, ...]


# The names of the passes by family, the least certain first: histograms of few bins were compiled and never
# run, and the experts' products use what only a GPU has.
FAMILIES = {
    "sums": ("sums of a router",),
    "grouping": ("pairs by expert",),
    "experts": ("experts", "SwiGLU"),
    "router": ("scores of a router", "weights of the chosen"),
    "rows": ("gather", "combine"),
    "loss": ("cross entropy",),
    "norms": ("RMSNorm", "residual sum and RMSNorm"),
    "rotary": ("rotated sides", "rotary"),
}


def run(machine: Machine, section: Section, family: str) -> None:
    """Require each kernel to equal its plain form, forward and backward; report the times of both."""
    device = torch.device(machine.device)
    problem = triton_problem() if machine.device == "cuda" else ""
    if problem:
        section.add("Triton", problem, holds=False, note="our kernels cannot run: the plain forms are used")
        return
    ours = Kernels(compiled=True, triton=True, triton_products=True)
    for dtype in DTYPES["cpu" if machine.quick else machine.device]:
        sizes = SIZES["cpu" if machine.quick else machine.device]
        for each in (p for p in passes(sizes, dtype, device) if p.name in FAMILIES[family]):
            _compare(
                section, f"{each.name}, {str(dtype).removeprefix('torch.')}", each, ours, TOLERANCE[dtype]
            )


def run_tiles(machine: Machine, section: Section) -> None:
    """Report the fastest tiles."""
    if machine.device == "cpu" or machine.quick:
        raise Skip("needs a GPU")
    problem = triton_problem()
    if problem:
        raise Skip(problem)
    _try_tiles(section, torch.device(machine.device))


def passes(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Iterator[Pass]:
    """Yield the passes of an MoE layer and a block, with drawn inputs."""
    tokens, hidden, ffn, experts, choices, heads = sizes
    rows = tokens * choices
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=generator) * scale
        return drawn.to(device, dtype).requires_grad_()

    token_N = torch.arange(tokens).repeat_interleave(choices)[torch.randperm(rows, generator=generator)]
    token_N, counts_E = token_N.to(device), uneven_counts(rows, experts).to(device)
    weight_N = torch.rand(rows, generator=generator).to(device).requires_grad_()

    def gathered(hidden_TH: Tensor, kernels: Kernels) -> Tensor:
        return gather(hidden_TH, RowTokens.of(token_N, tokens, kernels), kernels)

    def combined(rows_NH: Tensor, weight_N: Tensor, kernels: Kernels) -> Tensor:
        return combine(rows_NH, weight_N, RowTokens.of(token_N, tokens, kernels), kernels)

    def through_experts(rows_NH: Tensor, up_EGH: Tensor, down_EHF: Tensor, kernels: Kernels) -> Tensor:
        return swiglu_experts(rows_NH, up_EGH, down_EHF, counts_E, kernels)

    expert_N = torch.randint(0, experts, (rows,), generator=generator).to(device)
    by_token_N = torch.arange(tokens, device=device).repeat_interleave(choices)

    def sorted_by_expert(weight_N: Tensor, kernels: Kernels) -> Tensor:
        return group_pairs(by_token_N, expert_N, weight_N, (tokens, experts), kernels).weight_N

    def summed(scores_TE: Tensor, kernels: Kernels) -> Tensor:
        probs_TE = scores_TE.softmax(-1)
        entropy, top_1, _ = gate_sums(probs_TE, by_token_N, kernels)
        losses = mean_squared_log_sum(scores_TE, kernels), balance(probs_TE, counts_E, kernels)
        return torch.stack([*losses, entropy / tokens, top_1 / tokens])

    label_T = torch.randint(0, WORDS, (tokens,), generator=generator).to(device)
    chosen_TK = by_token_N.new_tensor(range(choices)).expand(tokens, choices).contiguous()

    def weighted(probs_TE: Tensor, kernels: Kernels) -> Tensor:
        return renormalised_weights(probs_TE, probs_TE, chosen_TK, None, 2.5, kernels)

    def loss(logits_TV: Tensor, kernels: Kernels) -> Tensor:
        return CrossEntropy.apply(logits_TV, label_T, kernels)

    probs_TE = torch.rand(tokens, experts, generator=generator).to(device).requires_grad_()
    router = draw(tokens, hidden), draw(experts, hidden, scale=hidden**-0.5)
    yield Pass("scores of a router", router_scores, router)
    yield Pass("weights of the chosen", weighted, (probs_TE,))
    yield Pass("cross entropy", loss, (draw(tokens, WORDS),))
    yield Pass("pairs by expert", sorted_by_expert, (weight_N,))
    yield Pass("sums of a router", summed, (draw(tokens, experts).detach().float().requires_grad_(),))
    yield Pass("gather", gathered, (draw(tokens, hidden),))
    yield Pass("combine", combined, (draw(rows, hidden), weight_N))
    yield Pass("SwiGLU", swiglu, (draw(rows, 2 * ffn),))
    weights = draw(experts, 2 * ffn, hidden, scale=hidden**-0.5), draw(experts, hidden, ffn, scale=ffn**-0.5)
    yield Pass("experts", through_experts, (draw(rows, hidden), *weights))
    yield from _of_block(draw, tokens, hidden, heads)


def _of_block(draw: Callable[..., Tensor], tokens: int, hidden: int, heads: int) -> Iterator[Pass]:
    """Yield the passes of a block beside its MoE layer."""
    yield Pass("RMSNorm", partial(rms_norm, eps=1e-5), (draw(tokens, hidden), draw(hidden)))
    summed_norm = (draw(tokens, hidden), draw(tokens, hidden), draw(hidden))
    yield Pass("residual sum and RMSNorm", _joined(partial(summed_rms_norm, eps=1e-5)), summed_norm)
    heads_of_side = (tokens // 4, 4, heads, hidden // heads)
    sides = tuple(draw(*heads_of_side) for _ in range(3))
    yield Pass("rotated sides", _joined(partial(apply_rotary_qk, rotary=ROTARY)), sides)
    yield Pass("rotary", partial(apply_rotary, rotary=ROTARY), (draw(*heads_of_side),))


class CrossEntropy(torch.autograd.Function):
    """The loss of each token, fp32 [T], by the two passes of `megamoe.kernels.cross_entropy`."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, label_T: Tensor, kernels: Kernels) -> Tensor:
        """Find the sums."""
        found = statistics(logits_TV, label_T, kernels)
        ctx.save_for_backward(logits_TV, label_T, found.largest_T, 1 / found.sum_T)
        ctx.kernels = kernels
        return found.sum_T.log() + found.largest_T - found.label_logit_T

    @staticmethod
    def backward(ctx: Any, sent_T: Tensor) -> tuple[Tensor, None, None]:
        """Write the gradient over a copy of the logits."""
        logits_TV, label_T, *sums = ctx.saved_tensors
        given = logits_TV.clone(), label_T, Sums(*sums), sent_T.contiguous(), Target(1.0, 0.0)
        return write_gradient(*given, ctx.kernels), None, None


def _joined(call: Callable[..., tuple[Tensor, ...]]) -> Call:
    """Return the results of a call as one tensor."""
    return lambda *inputs, kernels: torch.cat(call(*inputs, kernels=kernels))


def _upstream_of(each: Pass) -> Tensor:
    """Draw a gradient of the pass's output: the same numbers for every implementation."""
    with torch.no_grad():
        output = each.call(*each.inputs, kernels=PLAIN)
    generator = torch.Generator(output.device).manual_seed(2)
    return torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)


def _both_ways(each: Pass, upstream: Tensor, kernels: Kernels) -> list[Tensor]:
    """Return the output and the gradient of every input."""
    output = each.call(*each.inputs, kernels=kernels)
    return [output.detach(), *torch.autograd.grad(output, each.inputs, upstream.to(output.dtype))]


def _compare(section: Section, name: str, each: Pass, ours: Kernels, tolerance: float) -> None:
    upstream = _upstream_of(each)
    expected = _both_ways(replace(each, inputs=_widened(each.inputs)), upstream, PLAIN)
    error = max(
        float((found.double() - right.double()).abs().max() / right.double().abs().max())
        for found, right in zip(_both_ways(each, upstream, ours), expected, strict=True)
    )
    note = f"largest error over the largest number, at most {tolerance:.2g}"
    section.add(name, error, holds=error <= tolerance, note=note)
    plain_s, ours_s = (seconds_of(partial(_both_ways, each, upstream, kernels)) for kernels in (PLAIN, ours))
    section.add(f"{name}: time", 1e3 * ours_s, "ms", note=f"{ours_s / plain_s:.3f} of the plain form's")


def _widened(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the inputs in fp32, in which the plain form is the reference."""
    return tuple(each.detach().float().requires_grad_() for each in inputs)


def _try_tiles(section: Section, device: torch.device) -> None:
    """Report the fastest of some tiles for each product of the experts in bf16, beside the table's tile."""
    from megamoe.kernels.triton import common

    major = torch.cuda.get_device_capability(device)[0]
    ours = Kernels(compiled=True, triton=True, triton_products=True)
    each = next(p for p in passes(SIZES["cuda"], torch.bfloat16, device) if p.name == "experts")
    upstream = _upstream_of(each)
    built_in = dict(common.TILES)
    for kind in ("product", "up", "down_backward", "to_weight"):
        table = common.tile_of(kind, 2, major)
        times: dict[Any, float] = {}
        for tile in dict.fromkeys((table, *_neighbours(table))):
            common.TILES[kind, 2, major] = tile
            try:
                times[tile] = seconds_of(partial(_both_ways, each, upstream, ours))
            except Exception as error:  # a tile that needs more shared memory than the device has
                section.add(f"tile of {kind}", f"{tile}: {type(error).__name__}")
        common.TILES.clear()
        common.TILES.update(built_in)
        best = min(times, key=lambda tile: times[tile])
        ratio = times[best] / times[table] if table in times else float("nan")
        section.add(f"tile of {kind}", str(best), note=f"{ratio:.3f} of the time with the table's {table}")


def _neighbours(tile: Any) -> Iterator[Any]:
    """Yield tiles that differ from one in a size, the number of warps or of stages."""
    for name, factors in (("rows", (0.5, 2)), ("columns", (0.5, 2)), ("depth", (0.5, 2)), ("warps", (0.5,))):
        for factor in factors:
            yield replace(
                tile, **{name: max(16 if name != "warps" else 4, int(getattr(tile, name) * factor))}
            )
    yield replace(tile, stages=tile.stages - 1)
