"""One training step on one rank: its record, and the gradient that each parameter gets before clipping."""

from collections.abc import Sequence

from torch import Tensor

from megamoe.data.batches import Batch
from megamoe.moe.part import StepContext
from megamoe.train.step import train_step
from megamoe.train.step_record import StepRecord
from tests.support.tiny import tiny, tiny_engine
from tests.train.test_step import BATCHES


def one_step(*overrides: str, batches: Sequence[Batch] = BATCHES) -> tuple[StepRecord, dict[str, Tensor]]:
    """Return (record, gradients by name) of a step of the tiny run; needs the fixture `one_rank`."""
    context = StepContext(seed=3, step=1)
    engine = tiny_engine(tiny("model.init_std=0.3", *overrides), context)
    engine.train(True)
    found: dict[str, Tensor] = {}
    for name, parameter in engine.model.named_parameters():

        def keep(gradient: Tensor, name: str = name) -> None:
            found[name] = found[name] + gradient if name in found else gradient.clone()

        parameter.register_hook(keep)
    return train_step(engine, context, list(batches), 1e-3, 0.0), found


def router_gradients(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those of the scorers' weights."""
    return {name: gradient for name, gradient in gradients.items() if ".router." in name}
