"""dense_to_sparse: the temperature's course, and the noise."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from megamoe.moe.part import StepContext
from tests.support.moe.build import make_hidden, make_layer, make_part, make_router, moe_config


def test_the_temperature_falls_by_the_same_factor_and_is_kept() -> None:
    scorer = make_part("scorer", "dense_to_sparse", start=8.0, end=0.5, steps=4)
    found = []
    for step in range(1, 7):
        found.append(scorer.temperature.item())
        scorer.after_step(torch.zeros(4), StepContext(step=step))
    torch.testing.assert_close(torch.tensor(found), torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5, 0.5]))
    assert "temperature" in scorer.state_dict()


def test_scores_by_formula_and_gumbel_noise_in_training_alone() -> None:
    """A Gumbel's mean is 0.5772, its variance pi^2/6."""
    scorer, hidden_TH = make_part("scorer", "dense_to_sparse", 50, start=2.0), make_hidden(2000)
    clean_TE = functional.linear(hidden_TH, scorer.weight)
    noise_TE = 2 * scorer(hidden_TH, StepContext()) - clean_TE
    assert abs(noise_TE.mean().item() - 0.5772) < 0.02 and abs(noise_TE.var().item() - 1.645) < 0.03
    torch.testing.assert_close(scorer.eval()(hidden_TH, StepContext()), clean_TE / 2)


@pytest.mark.parametrize("num_experts", [16, 64])
def test_the_preset_begins_with_almost_all_experts_whatever_their_number(num_experts: int) -> None:
    router, hidden_TH = make_router(num_experts, "dense_to_sparse"), make_hidden(64)
    scorer: Any = router.scorer
    widths = []
    for temperature in (scorer.config.start, 1.0, scorer.config.end):
        scorer.temperature.fill_(temperature)
        widths.append(len(router(hidden_TH, StepContext()).pairs.token_N) / 64)
    assert widths[0] > 0.95 * num_experts and widths[-1] < 0.3 * num_experts
    assert widths == sorted(widths, reverse=True)


def test_tokens_have_fewer_experts_as_it_falls() -> None:
    router = {
        "scorer": {"name": "dense_to_sparse", "start": 50.0, "end": 0.1, "steps": 3},
        "selector": {"name": "above", "value": 0.05, "at_least": 1},
    }
    layer, widths = make_layer(moe_config(num_experts=8, router=router)), []
    for step in range(1, 5):
        layer.context.step = step
        pairs = layer.router(make_hidden(64), layer.context).pairs
        widths.append(len(pairs.token_N) / 64)
        layer.after_step(torch.zeros(8, dtype=torch.int64))
    assert widths[0] == 8 and widths[-1] < 2 and widths == sorted(widths, reverse=True)
