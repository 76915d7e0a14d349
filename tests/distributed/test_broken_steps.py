"""A gradient that is not finite ends the run on every rank, at every stage, and moves no weight."""

import math
from typing import Any

import pytest
import torch

from megamoe.errors import UserError
from megamoe.train.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.runs import PLAIN_FILES, ds_config, small_run

FILES = PLAIN_FILES


def step_with_a_broken_gradient(value: float, **changes: Any) -> str:
    """Job: the loss is finite, but a gradient of rank 1 alone is not; returns what the user is told."""
    trainer = Trainer(small_run(**changes))
    weights = list(trainer.engine.model.parameters())
    before = [weight.detach().clone() for weight in weights]
    try:
        if trainer.world.rank == 1:
            weights[0].register_hook(lambda gradient: gradient * value)
        trainer.step()
    except UserError as error:
        assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))
        return str(error)
    finally:
        trainer.close()
    return "went on"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_gradient_ends_the_run_on_all_ranks(pool: Pool, name: str, value: float) -> None:
    layout = {"parallel__expert": 2, "parallel__deepspeed": ds_config(name)}
    messages = pool.run(step_with_a_broken_gradient, value, **layout, ranks=2)
    for message in messages:
        assert message.startswith("step 1: train/lm_loss is "), message
        assert "Lower optimizer.lr" in message
