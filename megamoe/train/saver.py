"""The checkpoints of a run: the one that it goes on from, its saves, and their copies in object storage."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megamoe.checkpoint import remote
from megamoe.checkpoint.format.meta import read_meta
from megamoe.checkpoint.format.reader import CheckpointReader
from megamoe.checkpoint.manager import Checkpoints, first_intact
from megamoe.checkpoint.uploads import Uploads, open_uploads
from megamoe.config import RunConfig
from megamoe.metrics import check_record
from megamoe.parallel.consensus import catch_error, largest_of_ranks, raise_any_error
from megamoe.parallel.launch import World
from megamoe.parallel.zero.engine import Engine
from megamoe.resilience.heartbeat import tick
from megamoe.train.resume import check_init, check_resume
from megamoe.train.run_folder import RunFolder, choose_run_folder, newest_in

UPLOAD_POLL_S = 1.0
UPLOAD_AFTER_SIGNAL_S = 300.0  # half of what the sbatch files leave a job after a signal


def check_start(config: RunConfig, vocabulary: int, folder: RunFolder) -> list[str]:
    """Check the checkpoint that the run goes on from or takes its weights from, if any; return its changes.

    Raises:
        UserError: if it does not fit the run.
    """
    if folder.resume_from is not None:
        return check_resume(config, vocabulary, folder.resume_from)
    if config.checkpoint.init.path is not None:
        check_init(config, vocabulary, folder.path)
    return []


class Saver:
    """Saves the run and chooses the checkpoint that it goes on from.

    When it is made, no rank is started: it chooses the run's folder and checks the checkpoint in it; `open`
    follows on the started ranks.

    vocabulary: the size, to compare with the checkpoint's. on_save: called on every rank with each checkpoint
    that is published. last: the newest checkpoint that this launch wrote or resumed from. saved_step: of the
    newest save, which may still be under way. changes: a line of each in the configuration since then.

    Raises (when made):
        UserError: if the run cannot go on from the checkpoint, or not begin from `checkpoint.init`.
    """

    checkpoints: Checkpoints

    def __init__(
        self, config: RunConfig, vocabulary: int, world: World, on_save: Callable[[Path], None]
    ) -> None:
        self.config, self.vocabulary, self.world = config, vocabulary, world
        self.on_save = on_save
        remote.prepare(config, world.say, world.is_first)
        self.folder: RunFolder = choose_run_folder(config)
        self.resume_from = self.folder.resume_from
        self.changes = check_start(config, vocabulary, self.folder)
        self.last: Path | None = None
        self.saved_step = 0
        self._uploads: Uploads | None = None

    def open(self) -> CheckpointReader | None:
        """Open the checkpoint that the run goes on from; None: it begins at step 0. Collective."""
        if self.resume_from is not None and self.folder.continues:
            step = read_meta(self.resume_from)["step"]
            self._on_first(lambda: check_record(self.folder.path, step))
        if self.config.checkpoint.remote is not None:
            self._on_first(self._open_uploads)
        saves = self.config.checkpoint
        options = {} if self._uploads is None else {"is_needed": self._uploads.needs}
        self.checkpoints = Checkpoints(self.folder.checkpoints, saves.keep, saves.background, **options)
        if self.resume_from is None:
            return None
        self.last = self._choose_intact(self.resume_from)
        saved = CheckpointReader(self.last)
        self.saved_step = saved.meta["step"]
        return saved

    def _on_first(self, action: Callable[[], object]) -> None:
        """Do something on the first rank; the others learn of a problem."""
        raise_any_error(catch_error(action) if self.world.is_first else None)

    def _open_uploads(self) -> None:
        self._uploads = open_uploads(self.config, self.world.say, continues=self.folder.continues)

    def _choose_intact(self, checked: Path) -> Path:
        """Return the first intact candidate, a damaged one replaced by the storage's copy.

        It is uploaded if the storage lacks it. checked: the one that was found to fit this run.
        """
        replacement = remote.replacement(self.config, self.world.say) if self.folder.continues else None

        def replace(path: Path, inode: int) -> bool:
            if replacement is None or not replacement(path, inode):
                return False
            # The copy has a time of its own.
            self.folder = dataclasses.replace(self.folder, newest=newest_in(self.folder.checkpoints))
            return True

        path, damaged = first_intact(list(self.folder.candidates), self.world.say, replace=replace)
        self.checkpoints.damaged.update(damaged)
        if path != checked:
            self.changes = check_resume(self.config, self.vocabulary, path)
        if path != self.folder.candidates[0]:
            self.world.say(f"going on from {path}")
        for line in self.changes:
            self.world.say(line)
        if self._uploads is not None and self.folder.continues:
            self._uploads.add(path)
        return path

    def begin(self, engine: Engine, state: dict[str, Any]) -> None:
        """Begin a checkpoint of the state (`Meta`), when the save before is finished. Collective.

        With `checkpoint.background` the files are written later.
        """
        self.finish()
        self.checkpoints.begin(engine, state["step"], state)
        tick()
        self.saved_step = state["step"]
        if not self.config.checkpoint.background:
            self.finish()

    def finish(self) -> None:
        """Wait for a save that is under way, if any, and publish it. Collective."""
        if self.checkpoints.under_way:
            self.last = self.checkpoints.finish()
            if self._uploads is not None:
                self._uploads.add(self.last)
            self.on_save(self.last)
            self.world.say(f"saved {self.last}")

    def begin_uploads(self) -> None:
        """Let the first rank write to the object storage, if there is one. No other launch may be alive.

        Raises:
            UserError: if the storage does not answer.
        """
        if self._uploads is not None:
            self._uploads.begin()

    def finish_uploads(self, is_signalled: Callable[[], bool]) -> None:
        """Wait until the newest checkpoint is in the object storage; all ranks show progress meanwhile.

        After a signal they wait for at most UPLOAD_AFTER_SIGNAL_S, because a scheduler ends the job soon. The
        next launch uploads the checkpoint then.
        """
        signalled_s = math.inf
        while True:
            is_late = time.monotonic() - signalled_s > UPLOAD_AFTER_SIGNAL_S
            uploads = self._uploads is not None and not self._uploads.are_done
            waits, signalled = largest_of_ranks([float(uploads and not is_late), float(is_signalled())])
            if signalled:
                signalled_s = min(signalled_s, time.monotonic())
            if not waits:
                break
            tick()
            time.sleep(UPLOAD_POLL_S)
        if uploads:
            self._uploads = None  # the process ends without waiting
            line = "the newest checkpoint is on the disk and not uploaded yet; --resume uploads it"
            self.world.say(f"checkpoint.remote: {line}")
        raise_any_error(None if self._uploads is None else self._uploads.close())

    def close(self) -> None:
        """Wait until old checkpoints are deleted and complete ones uploaded."""
        self.checkpoints.close()
        if self._uploads is not None:
            self._uploads.close()
