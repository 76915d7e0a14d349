"""How the next token is chosen, from the logits alone."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megamoe.errors import UserError
from megamoe.moe import rng

MOST_TOKENS = 2**24


@dataclass(frozen=True)
class Sampling:
    """The options of a generation.

    max_tokens: tokens generated for a prompt at most. temperature: divides the logits; 0: the largest logit
    (greedy). top_k: only the k largest logits; None: all. top_p: of those, only the fewest whose
    probabilities reach p (Holtzman et al. 2020, nucleus sampling); None: all. stop: texts that end a
    generation, and are cut off. stop_tokens: reserved tokens that end one, such as the end of a turn.

    Raises:
        UserError: for a value out of its range.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 1234
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.max_tokens <= MOST_TOKENS:
            raise UserError(f"--max-tokens: found {self.max_tokens}, expected 1 to {MOST_TOKENS}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(
                f"--temperature: found {self.temperature:g}, expected at least 0; 0 takes the likeliest"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"--top-k: found {self.top_k}, expected at least 1; leave it out for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"--top-p: found {self.top_p:g}, expected above 0 and at most 1")
        if "" in self.stop:
            raise UserError("--stop: found an empty text, expected at least one character")

    def key_of(self, tokens: list[int], occurrence: int) -> int:
        """Return the key of a prompt's draws: of the seed, the prompt, and how often it came before."""
        return rng.key(self.seed, occurrence, 0, f"generate {tokens}")

    def probabilities(self, logits_BV: Tensor) -> Tensor:
        """fp32 [B, V] -> the probabilities of the next token, float64 [B, V]; 0 where an option excludes it.

        `temperature` must be above 0. Of equal logits at the edge of `top_k` or `top_p`, smaller ids stay.
        """
        scaled_BV = logits_BV.double() / self.temperature
        sorted_BV, order_BV = scaled_BV.sort(dim=1, descending=True, stable=True)
        if self.top_k is not None:
            sorted_BV[:, self.top_k :] = -math.inf
        share_BV = sorted_BV.softmax(dim=1)
        if self.top_p is not None:
            before_BV = share_BV.cumsum(dim=1) - share_BV
            share_BV = share_BV.masked_fill(before_BV >= self.top_p, 0.0)
            share_BV = share_BV / share_BV.sum(dim=1, keepdim=True)
        return torch.zeros_like(share_BV).scatter(1, order_BV, share_BV)

    def choose(self, logits_BV: Tensor, keys: list[int], place: int) -> list[int]:
        """Return the next token of each sequence.

        keys: of `key_of`, one for each sequence. place: the number of the generated token, from 0. A draw
        depends on its sequence's logits, its key and its place, not on the other sequences.
        """
        if self.temperature == 0:
            return logits_BV.argmax(dim=1).tolist()
        sum_BV = self.probabilities(logits_BV).cumsum(dim=1)
        index_T = torch.tensor([place])
        units = torch.cat([rng.plain_uniform(key, index_T, 2) for key in keys]).double()
        unit_B1 = (units[:, :1] + units[:, 1:] * 2.0**-24).to(sum_BV.device)  # 48 bits, below 1
        drawn_B1 = torch.searchsorted(sum_BV, unit_B1 * sum_BV[:, -1:], right=True)
        # Rounding may make the target the total, which lies beyond the last token that can be drawn.
        last_B1 = (sum_BV < sum_BV[:, -1:]).sum(dim=1, keepdim=True)
        return drawn_B1.minimum(last_B1).squeeze(1).tolist()


def finite_norms(logits_BV: Tensor) -> Tensor:
    """Return the logarithm of the sum of a step's exponentials, [B].

    Raises:
        UserError: if one is not finite: no token is likelier than another then.
    """
    norm_B = logits_BV.logsumexp(dim=1)
    if not norm_B.isfinite().all():
        raise UserError(
            "the model's logits are not finite; generate with --precision fp32, or take another step"
        )
    return norm_B
