"""Our layer under loads that are planned: what an uneven routing costs it over an even one."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common.rounds import in_turn
from common.timers import DEVICE
from layers import ours
from layers.candidate import DTYPES, Shape, Weights
from layers.measure import NUM_INPUTS, WARM_UP_ROUNDS, Seconds, inputs_of, run_once, upstream_of

BISECTIONS = 40


def even_ranking(shape: Shape, seed: int) -> Tensor:
    """Return fp32 [T, E] whose k largest values of each token give every expert the same load."""
    pair_TK = torch.arange(shape.pairs).view(shape.tokens, shape.choices)
    shuffled_T = torch.randperm(shape.tokens, generator=torch.Generator().manual_seed(seed))
    expert_TK = pair_TK[shuffled_T] % shape.experts
    return torch.zeros(shape.tokens, shape.experts).scatter(1, expert_TK, 1.0)


def uneven_ranking(shape: Shape, seed: int, factor: float) -> Tensor:
    """Return random fp32 [T, E] under which the largest load is about `factor` times the mean.

    Offsets are added that fall from the first expert to the last by equal steps.
    """
    generator = torch.Generator().manual_seed(seed)
    random_TE = torch.randn(shape.tokens, shape.experts, generator=generator)
    offset_E = torch.linspace(1, 0, shape.experts)
    low, high = 0.0, 100.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        too_much = load_of(random_TE + middle * offset_E, shape) > factor
        low, high = (low, middle) if too_much else (middle, high)
    return random_TE + high * offset_E


def load_of(ranking_TE: Tensor, shape: Shape) -> float:
    """Return the largest load over the mean."""
    expert_TK = ranking_TE.topk(shape.choices, dim=1).indices
    return float(expert_TK.flatten().bincount().max()) * shape.experts / shape.pairs


def measure_uneven(
    shape: Shape, dtype: str, factor: float, rounds: int
) -> tuple[dict[str, Seconds], dict[str, list[float]]]:
    """Measure our layer with `even` and with `uneven` loads in turn, on the same weights and tokens.

    Return the seconds, and the largest load of each input over the mean.
    """
    layer = ours.build(shape, DTYPES[dtype], Weights.draw(shape)).to(DEVICE)
    planned: list[Tensor] = []
    layer.router.selector.register_forward_pre_hook(partial(_follow, planned))
    rankings = {
        "even": [even_ranking(shape, seed) for seed in range(NUM_INPUTS)],
        "uneven": [uneven_ranking(shape, seed, factor) for seed in range(NUM_INPUTS)],
    }
    inputs = [inputs_of("routed", shape, dtype, number) for number in range(NUM_INPUTS)]
    upstream = upstream_of("routed", shape, dtype)

    def run(name: str, number: int) -> tuple[float, float]:
        planned[:] = [rankings[name][number % NUM_INPUTS].to(DEVICE)]
        return run_once(layer, inputs[number % NUM_INPUTS], upstream)

    runs = {name: partial(run, name) for name in rankings}
    seconds = in_turn(runs, rounds, WARM_UP_ROUNDS)
    loads = {name: [load_of(ranking, shape) for ranking in made] for name, made in rankings.items()}
    return {name: Seconds.of(pairs) for name, pairs in seconds.items()}, loads


def _follow(planned: list[Tensor], module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Let the selector choose by what is planned; its weights stay the score function's."""
    scored, *rest = inputs
    return replace(scored, ranking_TE=planned[0]), *rest
