"""A step of AdamW or Adam as one Triton kernel: it reads and writes each number once.

PyTorch's fused step with a factor also writes the gradients back, and the rounded weights are a pass of their
own: 38 bytes a parameter with gradients and moments in fp32, where this kernel moves 30. With moments in bf16
it moves 22.
"""

import triton
import triton.language as tl
from torch import Tensor

from megamoe.compat.triton_launch import run_kernel
from megamoe.kernels.operators import kernel_operator
from megamoe.kernels.triton.common import bytes_of, cdiv

BLOCK = 1024  # parameters of one program


def _bytes(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    rounded: Tensor | None,
    *numbers: Tensor,
    result: None,
) -> int:
    return 2 * bytes_of(weight, mean, square) + bytes_of(gradient, rounded)


@kernel_operator("adamw", mutates={"weight", "mean", "square", "rounded"}, bytes_moved=_bytes)
def adamw(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    rounded: Tensor | None,
    numbers: Tensor,
    step: Tensor,
) -> None:
    """Update a weight, fp32, and its moments; write the weight into `rounded` in its dtype.

    gradient, mean, square: fp32 or bf16. Moments in bf16 are rounded at random, as in `optim.short_moments`.
    numbers: fp32 on the device: the gradient's factor, lr, 1 - beta1, 1 - beta2, the logarithms of beta1 and
    beta2, eps, decoupled weight decay, L2 regularisation. step: the number of the step, an fp32 scalar.
    """
    count = weight.numel()
    if count:
        arguments = (weight, gradient, mean, square, numbers, step, count)
        run_kernel(_adamw, (cdiv(count, BLOCK),), *arguments, rounded=rounded, BLOCK=BLOCK)


@triton.jit
def _adamw(  # type: ignore[no-untyped-def]
    weight, gradient, mean, square, numbers, step, count, rounded, BLOCK: tl.constexpr
):
    """Each program updates BLOCK numbers, in the order of PyTorch's operations."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    factor, lr = tl.load(numbers), tl.load(numbers + 1)
    new1, new2 = tl.load(numbers + 2), tl.load(numbers + 3)
    eps, decay, l2 = tl.load(numbers + 6), tl.load(numbers + 7), tl.load(numbers + 8)
    number = tl.load(step)
    correction1 = _one_minus_exp(number * tl.load(numbers + 4))
    correction2 = _one_minus_exp(number * tl.load(numbers + 5))
    w = tl.load(weight + place, mask=inside, other=0)
    g = tl.load(gradient + place, mask=inside, other=0).to(tl.float32) * factor
    m = tl.load(mean + place, mask=inside, other=0).to(tl.float32)
    v = tl.load(square + place, mask=inside, other=0).to(tl.float32)
    w -= lr * decay * w
    g += l2 * w
    m += (g - m) * new1
    v += (g * g - v) * new2
    w -= lr / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
    tl.store(weight + place, w, mask=inside)
    key = 2 * number.to(tl.int32)
    tl.store(mean + place, _rounded_at_random(m, key, mean.dtype.element_ty), mask=inside)
    tl.store(square + place, _rounded_at_random(v, key + 1, square.dtype.element_ty), mask=inside)
    if rounded is not None:
        tl.store(rounded + place, w.to(rounded.dtype.element_ty), mask=inside)


@triton.jit
def _one_minus_exp(exponent):  # type: ignore[no-untyped-def]
    """Return 1 - exp(x) for x below 0, in fp32 also near 0."""
    series = 1.0
    for power in tl.static_range(9, 1, -1):
        series = 1.0 + series * exponent / power
    return tl.where(exponent > -0.5, -exponent * series, 1.0 - tl.exp(exponent))


@triton.jit
def _rounded_at_random(values, key, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return fp32 values in `dtype`: as they are, or in bf16 as `optim.short_moments.rounded_at_random`."""
    if dtype == tl.float32:
        return values
    bits = values.to(tl.int32, bitcast=True)
    draw = bits ^ (key * -1640531527)
    draw = (draw ^ (draw >> 16)) * 0x7FEB352D
    draw = (draw ^ (draw >> 15)) * -2073254261
    draw = (draw ^ (draw >> 16)) & 0xFFFF
    moved = ((bits + draw) & -65536).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(values) < float("inf"), moved, values).to(dtype)
