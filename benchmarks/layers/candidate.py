"""What every candidate has in common: sizes, weights, and how it is built."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megamoe.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class NotMeasured(Exception):
    """Why a candidate is left out, in a few words."""


@dataclass(frozen=True)
class Shape:
    """T tokens, hidden size H, FFN size F of an expert, E experts, k of which a token meets."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    choices: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """From `T,H,F,E,k`; UserError for sizes that make no layer."""
        numbers = text.split(",")
        if len(numbers) != 5 or not all(number.strip().isdecimal() for number in numbers):
            raise UserError(f"--shape: found {text!r}, expected five whole numbers T,H,F,E,k")
        shape = cls(*map(int, numbers))
        if min(map(int, numbers)) < 1 or shape.choices > shape.experts:
            raise UserError(f"--shape: found {text!r}, expected positive numbers, and at most k = E")
        if shape.pairs % shape.experts:
            raise UserError(f"--shape: found {text!r}, expected T*k to divide by E (the limit's equal loads)")
        return shape

    @property
    def pairs(self) -> int:
        """Rows that the experts see."""
        return self.tokens * self.choices

    def __str__(self) -> str:
        return f"T {self.tokens}, H {self.hidden}, F {self.ffn}, E {self.experts}, k {self.choices}"


@dataclass(frozen=True)
class Weights:
    """fp32 values that bf16 can hold, so that both dtypes and every candidate have the same.

    up_EGH: [E, 2F, H], the gate's F rows before the value's. down_EHF: [E, H, F].
    """

    router_EH: Tensor
    up_EGH: Tensor
    down_EHF: Tensor

    @classmethod
    def draw(cls, shape: Shape) -> "Weights":
        """Draw scores of standard deviation 1, and experts that keep the size of what goes through them."""
        generator = torch.Generator().manual_seed(1)
        experts, hidden, ffn = shape.experts, shape.hidden, shape.ffn
        return cls(
            draw(generator, experts, hidden) * hidden**-0.5,
            draw(generator, experts, 2 * ffn, hidden) * hidden**-0.5,
            draw(generator, experts, hidden, ffn) * ffn**-0.5,
        ).rounded()

    def rounded(self) -> "Weights":
        """Round to what bf16 can hold."""
        return Weights(*(weight.bfloat16().float() for weight in vars(self).values()))


def draw(generator: torch.Generator, *size: int) -> Tensor:
    """Normal draws that bf16 can hold, fp32."""
    return torch.randn(*size, generator=generator).bfloat16().float()


def draw_rows(seed: int, num_rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Normal draws, the same for every dtype."""
    return draw(torch.Generator().manual_seed(seed), num_rows, hidden).to(dtype)


@dataclass(frozen=True)
class Candidate:
    """Something to measure: how it is built, and what it computes.

    build: (shape, dtype of the experts' computation, weights) -> a module, [rows, H] -> [rows, H] in that
    dtype; raises NotMeasured. rows: what it gets and where they go; `routed`: T tokens by its own router,
    `even`: T*k rows that stand grouped by expert in equal numbers, `dense`: T tokens through the first k
    experts, each. router: the dtype of its scores. weight_is_one: at k = 1 the experts' output is not
    multiplied by the probability.
    """

    build: Callable[[Shape, torch.dtype, Weights], nn.Module]
    rows: Literal["routed", "even", "dense"] = "routed"
    router: Literal["fp32", "as experts", "none"] = "fp32"
    weight_is_one: bool = False
