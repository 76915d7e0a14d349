"""Jobs for runs that start from a checkpoint's weights; they return the weights of a rank."""

import gc
from pathlib import Path
from typing import Any

from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from megamoe.errors import UserError
from megamoe.train.trainer import Trainer
from tests.support.ranks.runs import small_run

Tensors = dict[str, Tensor]
Run = dict[str, Any]
STEP_1 = Path("small", "checkpoints", "step_00000001")


def weights_of_run(steps: int = 0, save: bool = False, **changes: Any) -> dict[str, Any]:
    """Job: return a run's weights and its optimiser's, at its start and after some steps.

    save: write a checkpoint at the end.
    """
    (found,) = weights_of_runs([{"steps": steps, "save": save, **changes}])
    return found


def weights_of_runs(runs: list[Run]) -> list[dict[str, Any]]:
    """Job: the same for several runs, one after the other in one world; `steps` and `save` are among the
    changes.
    """
    gc.freeze()  # so that collections after each run skip the imported objects
    return [_weights_of_run(**run) for run in runs]


def _weights_of_run(steps: int = 0, save: bool = False, **changes: Any) -> dict[str, Any]:
    trainer = Trainer(small_run(**changes))
    engine = trainer.engine
    found: dict[str, Any] = {
        "progress": trainer.progress,
        "moments": len(engine.inner_optimizer.state),
        "before": _weights(engine),
        "masters": _masters(engine),
        "valid": trainer.evaluate()["val/lm_loss"],
    }
    steps_taken = [trainer.step()[1] for _ in range(steps)]
    if save:
        trainer.save()
    trainer.release()
    words = ("lm_loss", "loss", "grad_norm")
    found["steps"] = [[s[f"train/{word}"] for word in words] for s in steps_taken]
    found["after"] = _weights(engine)
    del trainer, engine
    gc.collect()  # an engine and its parameters are in a reference cycle
    return found


def _weights(engine: Any) -> Tensors:
    with engine.gathered(engine.model.parameters()):
        return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


def _masters(engine: Any) -> Tensors:
    """Return the fp32 weight of every parameter in the optimiser."""
    trained = [(name, p) for name, p in engine.model.named_parameters() if p.requires_grad]
    if engine.stage > 0:
        return {name: safe_get_full_fp32_param(p).clone() for name, p in trained}
    held = {id(p) for group in engine.inner_optimizer.param_groups for p in group["params"]}
    masters = {name: engine.inner_optimizer.master_of(p) for name, p in trained}
    assert held == {id(master) for master in masters.values()}
    return {name: master.detach().clone() for name, master in masters.items()}


def refusal(**changes: Any) -> str:
    """Job: return the message that the user gets."""
    try:
        Trainer(small_run(**changes)).close()
    except UserError as error:
        return str(error)
    return "started"
