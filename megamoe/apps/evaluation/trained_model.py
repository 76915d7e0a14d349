"""A trained model from a checkpoint, without optimizer and DeepSpeed engine, at any layout."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megamoe.apps.routing_record.replay import RunRouting
from megamoe.checkpoint.format.folder import candidates, find_checkpoints
from megamoe.checkpoint.format.meta import Meta, read_meta
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.checkpoint.manager import first_intact
from megamoe.checkpoint.state import load_weights
from megamoe.config import RunConfig, configure
from megamoe.config.schema import ParallelConfig, Precision
from megamoe.data.batches import warn
from megamoe.data.vocabulary import Vocabulary
from megamoe.errors import UserError
from megamoe.model.architectures.decoder import GPT
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.model.backends import widen_products
from megamoe.model.build import build_model
from megamoe.moe.part import StepContext
from megamoe.objectives.objective import TrainingObjective
from megamoe.parallel import launch
from megamoe.parallel.consensus import catch_error, raise_any_error
from megamoe.parallel.layout import Layout
from megamoe.parallel.process_groups import start_groups
from megamoe.parallel.zero.deepspeed_moe_layer import moe_layer_factory
from megamoe.train.objective import build_objective
from megamoe.train.resolved import ResolvedRun, resolve_run
from megamoe.train.resume import changed_plugins, check_vocabulary
from megamoe.validation.run import section_problems

KEY = "checkpoint"
# Sections of a saved configuration that say how it was trained, not what was trained.
FP8_KEYS = ("fp8", "fp8_format", "fp8_amax_history")
FORGOTTEN = ("parallel", "optimizer", "checkpoint", "log", "output", "name")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class TrainedModel:
    """A model in evaluation mode, on this rank's device.

    path: its checkpoint. precision: of its weights, `fp32`, `bf16` or `fp16`. routing: the choices that it
    replays, if any.
    """

    path: Path
    meta: Meta
    config: RunConfig
    model: LanguageModel
    context: StepContext
    layout: Layout
    world: launch.World
    vocabulary: Vocabulary
    precision: str
    routing: RunRouting

    @cached_property
    def objective(self) -> TrainingObjective:
        """The objective that it was trained with."""
        return build_objective(self.config, self.vocabulary)

    @property
    def decoder(self) -> GPT:
        """The model of a session that opens decoders only."""
        assert isinstance(self.model, GPT)
        return self.model

    @property
    def step(self) -> int:
        """The optimizer step after which the checkpoint was saved."""
        return self.meta["step"]

    @property
    def validation_samples(self) -> int:
        """The samples, over all ranks, on which the run's validation loss was computed."""
        train, layout = self.meta["config"]["train"], self.meta["layout"]
        shared = layout["tensor"] * layout.get("pipeline", 1) * layout.get("context", 1)
        unit: int = train["micro_batch_size"] * layout["ranks"] // shared
        return self.config.evaluation.batches * int(train.get("global_batch_size") or unit)


@dataclass
class Session:
    """The ranks that open models, one after the other: the process group is started once.

    world: this rank's place. overrides: `section.key=value`, for all models. replays: whether
    `moe.router.replay` may name a record of the routing.
    """

    world: launch.World
    overrides: Sequence[str] = ()
    precision: str | None = None
    replays: bool = False
    _is_started: bool = field(default=False, repr=False)
    _intact: dict[Path, Path] = field(default_factory=dict, repr=False)  # the checkpoint, by what was named
    _told: set[str] = field(default_factory=set, repr=False)

    def check(
        self, path: Path, overrides: Sequence[str] = (), architectures: Sequence[str] = ("decoder",)
    ) -> RunConfig:
        """Return the configuration with which `open` would build the model, without building it.

        Raises:
            UserError: on every rank, as `open`, but for overrides that change a weight's shape.
        """
        _, run = self._resolve(path, overrides, architectures)
        raise_any_error(catch_error(RunRouting(run, self.world).check_evaluation))
        return run.config

    def open(
        self, path: Path, overrides: Sequence[str] = (), architectures: Sequence[str] = ("decoder",)
    ) -> TrainedModel:
        """Load the weights of a checkpoint, or of the newest intact one of a run's folder.

        overrides: of the saved configuration, after the session's; they may change how the model computes,
        but no weight's shape. architectures: those that the caller can use.

        Raises:
            UserError: on every rank, if there is no intact checkpoint, if it is of another architecture, or
                if the configuration does not fit its weights or this number of ranks.
        """
        meta, run = self._resolve(path, overrides, architectures)
        intact, config, precision = self.verified(path), run.config, self.precision_of(meta)
        groups = start_groups(run.plan.layout, config.parallel.timeout_minutes)
        context = StepContext(seed=config.seed, data_group=groups.data if run.plan.layout.data > 1 else None)
        context.step = meta["step"]
        factory = moe_layer_factory(context, groups, run.plan.layout)
        model = build_model(config, run.vocabulary.size, factory, run.kernels)

        def load() -> None:
            with CheckpointReader(intact, KEY) as reader:
                load_weights(reader, model, run.plan.layout, self.world.rank)

        raise_any_error(catch_error(load))
        widen_products(precision, self.world.device)
        for parameter in model.parameters():  # buffers stay fp32, as in training
            parameter.data = parameter.data.to(DTYPES[precision])
        model.to(self.world.device).eval()
        routing = RunRouting(run, self.world)
        raise_any_error(catch_error(routing.check_evaluation))
        routing.attach(model)
        return TrainedModel(
            path=intact,
            meta=meta,
            config=config,
            model=model,
            context=context,
            layout=run.plan.layout,
            world=self.world,
            vocabulary=run.vocabulary,
            precision=precision,
            routing=routing,
        )

    def _resolve(
        self, path: Path, overrides: Sequence[str], architectures: Sequence[str]
    ) -> tuple[Meta, ResolvedRun]:
        """Return what the checkpoint says of itself, and the checked run at this number of ranks."""
        intact = self.verified(path)
        meta = read_meta(intact, KEY)
        config = configuration_of(without_fp8(meta), intact, [*self.overrides, *overrides], self.replays)
        kind = config.model.architecture
        if kind not in architectures:
            raise UserError(
                f"{intact}: saved with model.architecture {kind}; this tool reads "
                f"{' and '.join(architectures)}"
            )
        for key in ("pipeline", "context"):
            if (size := getattr(config.parallel, key)) > 1:
                raise UserError(
                    f"parallel.{key}: found {size}, which training alone has; set it to 1, with which the "
                    "checkpoint of any layout opens"
                )
        self.tell_changes(config, meta)
        run = resolve_run(config, self.world.size)
        precision = self.precision_of(meta)
        for problem in section_problems(config, self.world.size, precision):
            # The checks of the run have passed in the precision of its layout.
            raise UserError(f"{intact}: in {precision}, {problem}; add --precision {run.plan.precision}")
        check_vocabulary(intact, meta, run.vocabulary.size)
        return meta, run

    def precision_of(self, meta: Meta) -> Precision:
        """Return the precision in which `open` computes with a checkpoint."""
        precision: Precision = self.precision or meta["layout"]["precision"]  # type: ignore[assignment]
        return "fp32" if precision == "fp16" and self.world.device.type == "cpu" else precision

    def tell_changes(self, config: RunConfig, meta: Meta) -> None:
        """Warn of plugins that have changed since the checkpoint: on rank 0, each once a session."""
        for line in changed_plugins(config, meta):
            if self.world.is_first and line not in self._told:
                warn(line)
            self._told.add(line)

    def verified(self, path: Path) -> Path:
        """Return the intact checkpoint that `path` names, the newest of a run; its bytes are read once in a
        session.

        Raises:
            UserError: on every rank, if there is none.
        """
        if path not in self._intact:
            found, is_run = find_checkpoints(path)
            if is_run:  # the one first that a resume would load first
                found = candidates(found[0].parent) or found
            if not self._is_started:
                launch.start(self.world, ParallelConfig().timeout_minutes)
                self._is_started = True
            self._intact[path], _ = first_intact(found, warn, "name another step_* folder or run")
        return self._intact[path]


@contextmanager
def session(
    overrides: Sequence[str] = (), precision: str | None = None, replays: bool = False
) -> Iterator[Session]:
    """Find this rank's place among the ranks; leave the process group at the end.

    precision: of the weights; default: as trained, but fp32 on the CPU for a model trained in fp16. replays:
    whether the models may replay a record of the routing.
    """
    try:
        yield Session(launch.find_world(), overrides, precision, replays)
    finally:
        launch.stop()


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Add forward hooks to modules, and remove them at the end. A hook takes the module, its positional
    arguments, those by name, and its output.
    """
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module, hook in hooks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def without_fp8(meta: Meta) -> Meta:
    """Return a checkpoint's description with a model that computes in its weights' precision.

    The tools read batches of any length, and FP8 products take multiples of 16 or 32 rows.
    """
    model = {key: value for key, value in meta["config"]["model"].items() if key not in FP8_KEYS}
    return {**meta, "config": {**meta["config"], "model": model}}


def configuration_of(meta: Meta, path: Path, overrides: Sequence[str], replays: bool = False) -> RunConfig:
    """Return the configuration that a checkpoint holds, at the default layout, with overrides.

    Plugins that the checkpoint names are not run: a user must name them with the override `plugins=[...]`.
    replays: whether the overrides may name a record of the routing.

    Raises:
        UserError: if the configuration is wrong, or needs plugins that the user does not name.
    """
    tree: dict[str, Any] = {key: value for key, value in meta["config"].items() if key not in FORGOTTEN}
    plugins = tree.pop("plugins", None)
    if plugins and not any(override.startswith("plugins=") for override in overrides):
        raise UserError(
            f"{path}: the model was trained with plugins={plugins}, which are run only where you name them; "
            f"add plugins={plugins} if you trust these files"
        )
    # The run may have trained with recorded choices; here they are replayed only if an override says so.
    router = {key: value for key, value in tree.get("moe", {}).get("router", {}).items() if key != "replay"}
    tree["moe"] = {**tree.get("moe", {}), "router": router}
    # The number of ranks may be another one, which need not divide the batches of training.
    free: dict[str, Any] = {"callbacks": [], "global_batch_size": None, "batch_rampup": None}
    tree["train"] = {**tree.get("train", {}), **free}
    config = configure(tree, list(overrides), source=str(path))
    if config.log.routing is not None:
        raise UserError(f"log.routing: found {config.log.routing!r}, but only training records; leave it out")
    if config.moe.router.replay is not None and not replays:
        raise UserError(
            f"moe.router.replay: found {config.moe.router.replay!r}, but only training and tools/evaluate.py "
            "replay; leave it out"
        )
    return config
