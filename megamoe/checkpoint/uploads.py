"""Uploading a run's checkpoints to object storage while it trains, and deleting old ones there."""

import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from megamoe.checkpoint.format import files
from megamoe.checkpoint.format.files import META, SUMS
from megamoe.checkpoint.format.folder import LATEST
from megamoe.checkpoint.remote import KEY, STREAMS, WRITER, RemoteFolder, step_of, told
from megamoe.config import RunConfig
from megamoe.io import METRICS_FILE
from megamoe.object_storage import RemoteError, reason_of
from megamoe.resilience.heartbeat import tick


def open_uploads(config: RunConfig, say: Callable[[str], None], *, continues: bool) -> "Uploads | None":
    """Return the uploads of a run that is about to start, on the first rank, or None without a storage.

    Nothing is written to the storage before `Uploads.begin`: another launch may still be running.

    continues: the run goes on; otherwise `overwrite` deletes the earlier run's checkpoints in the storage.

    Raises:
        UserError: if the storage does not answer.
    """
    saves = config.checkpoint
    if saves.remote is None:
        return None
    remote = RemoteFolder(saves.remote, config.name)
    with told(remote):
        remote.read_name(WRITER)
    folder, replaces = Path(config.output) / config.name, not continues and config.overwrite
    return Uploads(remote, folder, saves.keep, say, waits=True, replaces=replaces)


class Uploads:
    """Uploads complete checkpoints in a thread, one after the other; of those that wait, the newest alone.

    Used by the first rank. A checkpoint that cannot be uploaded is reported in one line and stays where it
    is; the next one is tried again.

    keep: complete checkpoints that stay in the storage. say: takes a line. waits: nothing is uploaded before
    `begin`. replaces: the storage's checkpoints are an earlier run's, which `begin` deletes.
    """

    def __init__(
        self,
        remote: RemoteFolder,
        run_folder: Path,
        keep: int,
        say: Callable[[str], None],
        *,
        waits: bool = False,
        replaces: bool = False,
    ) -> None:
        self.remote = remote
        self._waits, self._replaces = waits, replaces
        self.keep = keep
        self.launch = secrets.token_hex(4)
        self._record = run_folder / METRICS_FILE
        self._say = say
        self._waiting: Path | None = None
        self._current: Path | None = None
        self._problem: str | None = None  # of the newest checkpoint
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Become the launch that may write, and upload what was added; call it when no other launch runs.

        Raises:
            UserError: if the storage does not answer.
        """
        with told(self.remote):
            self.take_over()
            if self._replaces:
                self.remote.delete_all()
        with self._changed:
            self._waits = False
            if self._waiting is not None:
                self._start()

    def take_over(self) -> None:
        """Become the launch that may write; one that wrote before finds out and stops."""
        self.remote.write(self.launch.encode(), WRITER)

    def add(self, checkpoint: Path) -> None:
        """Upload a complete checkpoint as soon as the one before is done."""
        with self._changed:
            self._waiting, self._is_closed = checkpoint, False
            if not self._waits:
                self._start()

    def _start(self) -> None:
        """Start the thread if it has ended, and tell it that a checkpoint waits; with the lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def needs(self, checkpoint: Path) -> bool:
        """Return whether a checkpoint is being uploaded or waits, so that it must not be deleted."""
        with self._changed:
            return checkpoint in (self._waiting, self._current)

    @property
    def are_done(self) -> bool:
        """Whether every checkpoint that was added is in the storage, or could not be uploaded."""
        with self._changed:
            return self._thread is None or (self._waiting is None and self._current is None)

    def close(self) -> str | None:
        """Wait for the uploads; return why the newest checkpoint is not in the storage, or None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        while (thread := self._thread) is not None:
            tick()
            thread.join(1.0)
        return self._problem

    def _run(self) -> None:
        """Upload what is added, until the uploads are closed; `_thread` is None when the thread has ended."""
        try:
            for checkpoint in self._taken():
                self._try(checkpoint)
        finally:
            with self._changed:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _try(self, checkpoint: Path) -> None:
        """Upload a checkpoint, or report in a line why it cannot be uploaded."""
        problem: str | None = f"{KEY}: {checkpoint} is not in {self.remote.url}"
        try:
            self._upload(checkpoint)
            problem = None
        except Exception as error:  # training goes on whatever the storage's package raises
            problem = f"{problem}: {reason_of(error)}"
            self._tell(f"{problem}; it stays where it is")
        finally:
            with self._changed:
                self._problem, self._current = problem, None

    def _tell(self, line: str) -> None:
        """Print a line; a full disk or a closed pipe behind the output stops no upload."""
        with suppress(OSError, ValueError):
            self._say(line)

    def _taken(self) -> Iterator[Path]:
        while True:
            with self._changed:
                while self._waiting is None:
                    if self._is_closed:
                        self._thread = None
                        return
                    self._changed.wait()
                self._current, self._waiting = self._waiting, None
                current = self._current
            yield current

    def _upload(self, checkpoint: Path) -> None:
        listed = files.read_bytes(checkpoint / SUMS)
        sums = files.parse_sums(listed)
        latest = self.remote.read_name(LATEST)
        if latest and self.remote.read(latest, SUMS, most=files.LARGEST_JSON) == listed:
            return  # this is where the run goes on
        # By its step: a run may go on from a checkpoint that a user renamed.
        name = f"step_{files.read_json(checkpoint / META)['step']:08d}-{self.launch}"
        if step_of(latest) > step_of(name):
            place = f"{self.remote.url}/{latest}"
            line = f"{place} is of a later step than {checkpoint.name}; it stays until this run has passed it"
            self._tell(f"{KEY}: {line}")
        with ThreadPoolExecutor(STREAMS) as pool:  # after an error the files that wait are not tried
            list(pool.map(lambda file: self.remote.put(checkpoint / file, name, file), sums))
        self._check_writer()
        self.remote.put(checkpoint / SUMS, name, SUMS)
        self.remote.write(name.encode(), LATEST)
        if self._record.exists():
            copied = self._record.with_name(f".{METRICS_FILE}.uploading")
            try:
                shutil.copyfile(self._record, copied)  # the run appends to it
                self.remote.put(copied, METRICS_FILE)
            finally:
                copied.unlink(missing_ok=True)
        self._check_writer()
        self._delete_old(name)

    def _check_writer(self) -> None:
        writer = self.remote.read_name(WRITER)
        if writer != self.launch:
            raise RemoteError(f"another launch ({writer or 'unknown'}), which started later, writes there")

    def _delete_old(self, newest: str) -> None:
        """Delete complete checkpoints but the newest `keep`, and what ended launches have left incomplete.

        Those of later steps stay, and are not counted: another machine's, or of before the user went back.
        """
        found = self.remote.folders()
        complete = sorted(
            (name for name in found if found[name] and step_of(name) <= step_of(newest)),
            key=lambda name: (name != newest, -found[name]),
        )
        old = [*complete[self.keep :], *(name for name in found if not found[name])]
        for name in old:
            if name != newest:
                self.remote.delete(name)
