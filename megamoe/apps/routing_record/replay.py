"""Recording and replaying the routers' choices while a run trains and evaluates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megamoe.apps.routing_record.record import (
    Rows,
    begin_record,
    check_folder,
    evaluated_steps,
    file_name,
    fingerprint,
    last_whole_step,
    read_rows,
    recorded,
    write_rows,
)
from megamoe.config.layer_kinds import routed_by_layer
from megamoe.data.batches import Batch
from megamoe.errors import UserError
from megamoe.io import real
from megamoe.model.architectures.language_model import LanguageModel
from megamoe.moe.part import Selector, StepContext
from megamoe.moe.routing import Pairs, Scored, count
from megamoe.parallel.consensus import raise_any_error_fast
from megamoe.parallel.launch import World
from megamoe.train.resolved import ResolvedRun

RECORD, REPLAY = "log.routing", "moe.router.replay"
Part = tuple[Tensor, Tensor, Tensor]  # index_T, count_T, expert_N of a micro batch


class RunRouting:
    """What a run records (`log.routing`) and replays (`moe.router.replay`); nothing if neither is set.

    `check` must be called before ranks are started and `attach` when the model is built.
    """

    def __init__(self, run: ResolvedRun, world: World) -> None:
        config, layout = run.config, run.plan.layout
        self.world, self.experts = world, routed_by_layer(config)
        self.length = config.data.sequence_length
        self.files = layout.pipeline * layout.data
        self.file = layout.pipeline_rank(world.rank) * layout.data + layout.data_rank(world.rank)
        self.writes = world.rank % layout.batch_ranks == 0  # the others route the same tokens
        self.record = None if config.log.routing is None else Path(config.log.routing)
        self.replay = None if config.moe.router.replay is None else Path(config.moe.router.replay)
        self.meta = fingerprint(run) if self.record or self.replay else {}
        self.num_layers = len(self.meta.get("moe.layers", []))
        self.found: dict[int, dict[int, Part]] = {}  # by the layer's place and the micro batch
        self.rows: list[Rows] = []
        self.begun_after = 0
        self.is_begun = False

    def check(self, first_step: int, last_step: int, may_replace: bool) -> None:
        """Refuse a record of another model or data, or one that ends too early.

        may_replace: whether the choices that are already in `log.routing` may be removed.

        Raises:
            UserError: naming the key.
        """
        self.begun_after = first_step
        if self.record is not None:
            if self.replay is not None and real(self.record) == real(self.replay):
                raise UserError(f"{RECORD}: {self.record} is also {REPLAY}; record into another folder")
            if first_step == 0 and not may_replace and any(recorded(self.record)):
                raise UserError(
                    f"{RECORD}: {self.record} holds a record already; name another folder, or overwrite=true"
                )
            if not may_replace:
                check_folder(RECORD, self.record, self.meta)
        if self.replay is None:
            return
        if not check_folder(REPLAY, self.replay, self.meta):
            raise self._no_record()
        whole, problem = last_whole_step(self.replay, self.num_layers)
        if whole < last_step:
            raise UserError(
                f"{REPLAY}: the last whole step of {self.replay} is {whole}, this launch trains to step "
                f"{last_step}; of the step after: {problem}; stop earlier with train.exit_after_steps"
            )

    def check_evaluation(self) -> None:
        """Refuse to replay a record of another model or data in the evaluation of a checkpoint.

        The record's run may have had other steps and batches: they change no token of a validation set.

        Raises:
            UserError: naming the key.
        """
        if self.replay is None:
            return
        free = {key for key in self.meta if key.startswith("train.") and key != "train.objective"}
        same = {key: value for key, value in self.meta.items() if key not in free}
        if not check_folder(REPLAY, self.replay, same):
            raise self._no_record()

    @contextmanager
    def evaluation_of(self, step: int, phase: str, samples: int) -> Iterator[None]:
        """Replay the forward passes meanwhile as an evaluation at a step. Collective.

        phase: a validation set's name in metrics.jsonl. samples: of the evaluation, over all ranks. They must
        be as many as recorded ones, because their order in a data set depends on their number.

        Raises:
            UserError: on every rank, if the record has no such evaluation, or cannot be read.
        """
        if self.replay is None:
            yield
            return
        raise_any_error_fast(self._missing_evaluation(step, phase))
        with self.of(step, phase):
            found = len(self.rows[0].index_T) // self.length
            if found != samples:
                raise UserError(
                    f"{REPLAY}: {self.replay} has {found} samples of {phase} at step {step}, this "
                    f"evaluation takes {samples}; leave out --samples and evaluation.batches"
                )
            yield

    def _missing_evaluation(self, step: int, phase: str) -> str | None:
        assert self.replay is not None
        if (self.replay / file_name(step, phase, 0)).exists():
            return None
        steps = evaluated_steps(self.replay, phase)
        found = f"has them of steps {', '.join(map(str, steps))}" if steps else "has none at any step"
        return (
            f"{REPLAY}: {self.replay} has no choices of {phase} at the checkpoint's step {step}; it {found}; "
            "name a checkpoint of a step at which the recorded run evaluated"
        )

    def _no_record(self) -> UserError:
        return UserError(f"{REPLAY}: {self.replay} holds no record; expected the folder of {RECORD}")

    def attach(self, model: LanguageModel) -> None:
        """Put this between the routers of a model and their selectors."""
        if self.record is None and self.replay is None:
            return
        for number, layer in model.moe_layers():
            place = self.meta["moe.layers"].index(number)
            self.found[place] = {}
            layer.router.choices = _OfLayer(self, place)

    @contextmanager
    def of(self, step: int, phase: str) -> Iterator[None]:
        """Record and replay the forward passes meanwhile as those of a step. Collective.

        phase: `train`, or a validation set's name in metrics.jsonl.

        Raises:
            UserError: on every rank, if a record cannot be read or written.
        """
        if self.record is not None and not self.is_begun:
            self._together(self._begin)
        self.is_begun = True
        if self.replay is not None:
            self._together(lambda: self._load(step, phase))
        yield
        if self.record is not None:
            self._together(lambda: self._write(step, phase))

    def check_batches(self, batches: Sequence[Batch]) -> None:
        """Refuse, before they are computed, batches with tokens that are not in the record. Collective.

        Raises:
            UserError: on every rank.
        """
        if self.replay is None:
            return
        position_S = torch.arange(self.length)
        problem = None
        for batch in batches:
            index_BS = batch.sample_index_B.cpu()[:, None] * self.length + position_S
            if self.rows[0].find(index_BS.flatten()) is None:
                problem = f"{REPLAY}: {self.replay} lacks samples {batch.sample_index_B.tolist()}"
        raise_any_error_fast(problem)

    def select(self, place: int, selector: Selector, scored: Scored, context: StepContext) -> Pairs:
        """Return the pairs of a micro batch in the layer number `place`, from 0."""
        device = scored.scores_TE.device
        if self.replay is None:
            pairs = selector(scored, context)
        else:
            rows = self.rows[place]
            place_T = rows.find(context.token_index(scored.num_tokens, device).cpu())
            if place_T is None:
                raise UserError(f"{REPLAY}: {self.replay} lacks tokens of micro batch {context.micro_batch}")
            expert_TK, count_T = rows.choices(place_T)
            choices = expert_TK.to(device), count_T.to(device)
            pairs = selector.replayed(scored, *choices)
        if self.record is not None:
            index_T = context.token_index(scored.num_tokens, device)
            # A block that is recomputed chooses the same again.
            count_T = count(pairs.token_N, scored.num_tokens)
            self.found[place][context.micro_batch] = (index_T, count_T, pairs.expert_N)
        return pairs

    def _together(self, work: Any) -> None:
        problem = None
        try:
            work()
        except UserError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{RECORD}: {self.record} cannot be written: {error.strerror}"
        raise_any_error_fast(problem)

    def _begin(self) -> None:
        assert self.record is not None
        if self.world.is_first:
            begin_record(self.record, self.meta, self.begun_after)

    def _load(self, step: int, phase: str) -> None:
        assert self.replay is not None
        try:
            self.rows = read_rows(self.replay, step, phase, self.num_layers)
        except ValueError as error:
            raise UserError(f"{REPLAY}: {self.replay}: step {step}, {phase}: {error}") from error

    def _write(self, step: int, phase: str) -> None:
        assert self.record is not None
        if self.writes:
            layers = {}
            for place, found in self.found.items():
                columns = zip(*(found[number] for number in sorted(found)), strict=True)
                layers[place] = Rows.of(*(torch.cat(column).cpu() for column in columns))
            path = self.record / file_name(step, phase, self.file)
            write_rows(path, layers, self.experts, self.files)
        for found in self.found.values():
            found.clear()


class _OfLayer:
    """The choices of one layer, for its router."""

    def __init__(self, routing: RunRouting, place: int) -> None:
        self.routing, self.place = routing, place

    def select(self, selector: Selector, scored: Scored, context: StepContext) -> Pairs:
        """Return the pairs of the micro batch."""
        return self.routing.select(self.place, selector, scored, context)
