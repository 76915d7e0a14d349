"""Callbacks: a user's own code in the training loop, chosen by name in the YAML (`train.callbacks`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megamoe.config import PartChoice, RunConfig
from megamoe.errors import UserError, is_lost_contact
from megamoe.parallel.consensus import raise_any_error_fast
from megamoe.parallel.launch import World
from megamoe.registry import failure_of, get_part, is_ours, naming_failures
from megamoe.resilience.heartbeat import tick


class TrainingRun(Protocol):
    """What a callback may use of the trainer (megamoe/train/trainer.py), which has more.

    progress.step: the steps done. engine.gathered: whole parameters, whatever ZeRO has cut. folder.path: the
    run's folder. last_checkpoint: the newest one that this launch wrote or resumed from, if any.
    """

    config: RunConfig
    world: World
    progress: Any
    engine: Any

    @property
    def folder(self) -> Any: ...

    @property
    def last_checkpoint(self) -> Any: ...

    @property
    def model(self) -> Any: ...


class Callback:
    """Base class of callbacks. A subclass has a nested dataclass `Config` and defines the methods that it
    needs.

    `register("callback", name)` registers it. Every rank calls each method, so a method may gather parameters
    (`trainer.engine.gathered`) and call collectives. `trainer.world.is_first` is true on rank 0,
    `trainer.progress.step` is the number of steps done, and `trainer.folder.path` is the run's folder.

    Args:
        config: the checked options from the YAML.
    """

    @dataclass
    class Config:
        """No options."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def on_train_begin(self, trainer: TrainingRun) -> None:
        """Called once per launch, also after a resume, before the first step and the initial evaluation."""

    def on_step_begin(self, trainer: TrainingRun) -> None:
        """Called before each optimizer step."""

    def on_step_end(self, trainer: TrainingRun, metrics: Mapping[str, Any]) -> None:
        """Called after each optimizer step; metrics: the step's, by their names in metrics.jsonl,
        read-only.
        """

    def on_evaluate(self, trainer: TrainingRun, metrics: Mapping[str, float]) -> None:
        """Called after each evaluation; metrics: its losses, by their names in metrics.jsonl, read-only."""

    def on_save(self, trainer: TrainingRun, path: Path) -> None:
        """Called when a checkpoint is complete in the folder `path`; later steps may already be done."""

    def on_train_end(self, trainer: TrainingRun) -> None:
        """Called after the last step and save, at a planned stop or a signal too, but not after an error."""


def is_due(step: int, every: int) -> bool:
    """Whether what happens every so many steps happens at this one, counted from 1; 0: never."""
    return every > 0 and step % every == 0


class Callbacks:
    """The callbacks of a run, in the order of the YAML; own: of the package, called after them.

    A rank may have other ones of the package than the others, so their methods are no collectives.

    Raises (when built):
        UserError: naming the callback, if its class is not a `Callback` or its __init__ fails.
    """

    def __init__(self, choices: Sequence[PartChoice], own: Sequence[Callback] = ()) -> None:
        self._named, self._own = [(choice.name, _build(choice)) for choice in choices], own

    def call(self, hook: str, trainer: TrainingRun, *arguments: Any) -> None:
        """Call a method of all callbacks in order.

        Raises:
            CollectiveError: on every rank, if a callback raised on one of them.
        """
        passed = [MappingProxyType(it) if isinstance(it, dict) else it for it in arguments]
        for name, callback in self._named:
            problem = None
            try:
                getattr(callback, hook)(trainer, *passed)
            except Exception as error:
                if is_ours(type(callback)) or is_lost_contact(error):
                    raise
                own = isinstance(error, UserError)
                reason = f": {error}" if own else f" failed{failure_of(type(callback), error)}"
                problem = f"train.callbacks: {hook} of the callback {name!r}{reason}"
            raise_any_error_fast(problem)
            tick()
        for callback in self._own:
            getattr(callback, hook)(trainer, *passed)


def _build(choice: PartChoice) -> Callback:
    part = get_part("callback", choice.name)
    if not issubclass(part, Callback):
        raise UserError(
            f"train.callbacks: the class {part.__qualname__} of the callback {choice.name!r} is no subclass "
            "of megamoe.train.callbacks.Callback; make it one"
        )
    with naming_failures(part, f"train.callbacks: the __init__ of {choice.name!r}"):
        return part(choice.options)
