"""A run's checkpoints in object storage: their places, finding and fetching them. `uploads` writes them.

REMOTE/RUN/step_00000300-4f2a91c0/   a checkpoint's files; SHA256SUMS is the last, and makes it complete
REMOTE/RUN/latest                    the name of the newest complete one
REMOTE/RUN/writer                    the launch that may write here, which is the one that started last
REMOTE/RUN/metrics.jsonl             the run's record at the time of the newest upload

Object storage cannot rename a folder at once. So a launch adds a suffix of its own to each name, and no two
launches ever write the same object. Everything goes through fsspec, whose packages find the credentials.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from megamoe import object_storage
from megamoe.checkpoint.format import files
from megamoe.checkpoint.format.files import SUMS
from megamoe.checkpoint.format.folder import LATEST, candidates, inode_of, remove
from megamoe.checkpoint.format.meta import read_meta
from megamoe.config import RunConfig
from megamoe.errors import UserError
from megamoe.io import METRICS_FILE, replace_file, sync, unused_name
from megamoe.resilience.processes import Launch

KEY = "checkpoint.remote"
WRITER = "writer"
LOCK_POLL_S = 2.0  # seconds between two tries of each waiting rank for the lock of the one that fetches
FETCHING = ".fetching_"  # prefix of a checkpoint that is being fetched
DAMAGES = ".damaged_in_storage"  # in the folder of checkpoints: what was found damaged in the storage
DAMAGES_HOLD_S = 3600.0  # how long the ranks and launches that follow believe it
STREAMS = 4  # files that are sent or fetched at a time
LONGEST_NAME = 200  # bytes that are read of `latest` and `writer`
NAME = re.compile(r"[a-z0-9_-]+")
OWN_NAME = re.compile(r"step_[0-9]{8,}-[0-9a-f]{8}")
Result = TypeVar("Result")


class RemoteFolder:
    """The folder REMOTE/RUN. Every method may raise RemoteError after the attempts of WAITS_S."""

    def __init__(self, remote: str, run: str) -> None:
        self.url = f"{remote.rstrip('/')}/{run}"
        self._fs, self._path = object_storage.open_system(self.url)

    def _place(self, *names: str) -> str:
        return "/".join((self._path, *names))

    def _attempt(self, action: Callable[[], Result], *, creates: bool = False) -> Result:
        """Return what the action returns. FileNotFoundError passes, unless it `creates` an object."""
        # A full bucket may be emptied; the next checkpoint tries again.
        return object_storage.attempt(
            action, object_storage.WAITS_S, passes=() if creates else (FileNotFoundError,)
        )

    def read(self, *names: str, most: int) -> bytes | None:
        """Return the content of a small object, or None if there is none.

        Raises:
            RemoteError: also if it is larger than `most` bytes.
        """
        try:
            content: bytes = self._attempt(lambda: self._fs.cat_file(self._place(*names), end=most + 1))
        except FileNotFoundError:
            return None
        if len(content) > most:
            raise object_storage.RemoteError(f"{'/'.join(names)}: larger than {most:,} bytes")
        return content

    def write(self, content: bytes, *names: str) -> None:
        """Write a small object in one request."""
        self._attempt(lambda: self._fs.pipe_file(self._place(*names), content), creates=True)

    def read_name(self, name: str) -> str:
        """Return the text of `latest` or `writer`; empty if there is none."""
        found = self.read(name, most=LONGEST_NAME) or b""
        text = found.decode("utf-8", "replace").strip()
        return text if NAME.fullmatch(text) else ""

    def folders(self) -> dict[str, float]:
        """Return the checkpoints' names, and when each was complete, in s; 0 for an incomplete one."""

        def list_them() -> dict[str, float]:
            found: dict[str, float] = {}
            for path in self._fs.find(self._path):
                name, _, file = path.removeprefix(self._path).lstrip("/").partition("/")
                if OWN_NAME.fullmatch(name) and file:  # not one that a user renamed
                    found.setdefault(name, 0.0)
                    if file == SUMS:
                        with contextlib.suppress(FileNotFoundError):  # an old one, deleted meanwhile
                            found[name] = self._fs.modified(path).timestamp()
            return found

        try:
            return self._attempt(list_them)
        except FileNotFoundError:
            return {}

    def complete(self) -> list[str]:
        """Return the names of complete checkpoints: what `latest` names, then the newest first.

        Raises:
            RemoteError: also if `latest` names one, and none is listed twice: a run would begin at step 0.
        """
        for _ in range(2):  # a listing may be older than `latest`
            latest = self.read_name(LATEST)
            found = {name: date for name, date in self.folders().items() if date}
            if found or not latest:
                return sorted(found, key=lambda name: (name != latest, -found[name]))
        raise object_storage.RemoteError(
            f"`{LATEST}` names {latest}, but no complete checkpoint is listed (were they deleted on purpose, "
            f"delete `{LATEST}` too)"
        )

    def put(self, local: Path, *names: str) -> None:
        """Upload a file, and compare the size of the object with it."""
        size = local.stat().st_size

        def put_it() -> None:
            self._fs.put_file(str(local), self._place(*names))
            found = self._fs.info(self._place(*names))["size"]
            if found != size:
                raise OSError(f"{names[-1]}: {found:,} of {size:,} bytes arrived")

        self._attempt(put_it, creates=True)

    def get(self, local: Path, *names: str) -> None:
        """Download an object into a new file."""
        self._attempt(lambda: self._fs.get_file(self._place(*names), str(local)))

    def delete_all(self) -> None:
        """Delete all checkpoints, `latest` first."""
        with contextlib.suppress(FileNotFoundError):
            self._attempt(lambda: self._fs.rm_file(self._place(LATEST)))
        for name in self.folders():
            self.delete(name)

    def delete(self, name: str) -> None:
        """Delete a checkpoint, SHA256SUMS first, so that none is half deleted and looks complete."""
        with contextlib.suppress(FileNotFoundError):
            self._attempt(lambda: self._fs.rm_file(self._place(name, SUMS)))
        with contextlib.suppress(FileNotFoundError):
            self._attempt(lambda: self._fs.rm(self._place(name), recursive=True))


def prepare(config: RunConfig, say: Callable[[str], None], is_first: bool) -> None:
    """Fetch what `checkpoint.resume: auto` goes on from, if this machine's checkpoints are of earlier steps.

    A run that begins refuses a place where another one's checkpoints are (on the first rank).

    Raises:
        UserError: for that, for a wrong `checkpoint.remote`, and if the storage does not answer.
    """
    saves = config.checkpoint
    if saves.remote is None:
        return
    object_storage.check_folder(KEY, saves.remote)
    remote, folder = RemoteFolder(saves.remote, config.name), Path(config.output) / config.name
    if saves.resume == "auto":
        fetch_newest(remote, folder, say, is_first)
        return
    goes_on = Launch.restarted(folder) is not None or candidates(folder / "checkpoints")
    if is_first and not config.overwrite and not goes_on:
        with told(remote):
            found = remote.complete()
        if found:
            raise UserError(
                f"{KEY}: {remote.url} holds {found[0]}: add --resume to go on with it, overwrite=true to "
                "begin anew, or name=... for another one"
            )


@contextlib.contextmanager
def told(remote: RemoteFolder) -> Iterator[None]:
    """Turn RemoteError into a UserError."""
    try:
        yield
    except object_storage.RemoteError as error:
        raise UserError(
            f"{KEY}: {remote.url} does not answer as expected: {error}; check the network and the "
            "credentials, or start without it by checkpoint.remote=null"
        ) from None


def fetch_newest(
    remote: RemoteFolder, run_folder: Path, say: Callable[[str], None], is_first: bool = True
) -> None:
    """Fetch the newest intact remote checkpoint if it is of a later step than those in the run's folder.

    One process of those that see the folder does it, the others wait. A damaged one is reported, and the next
    taken. The run's record is fetched with it. What is in the folder stays there; a record, or a checkpoint
    of the same step, under another name.

    is_first: whether this is the first rank. Another rank whose machine has checkpoints does not need the
    storage; the ranks compare later where they go on.

    Raises:
        UserError: if the storage does not answer, or, without a checkpoint in the folder, if none is intact.
    """
    checkpoints = run_folder / "checkpoints"
    fetches = not candidates(checkpoints)
    with told(remote) if fetches or is_first else contextlib.suppress(object_storage.RemoteError):
        fetches = fetches or bool(_later(remote, checkpoints))
    if not fetches:
        return
    try:
        run_folder.parent.mkdir(parents=True, exist_ok=True)
        with told(remote), _fetch_lock(run_folder):
            _fetch(remote, run_folder, say)
    except OSError as error:
        raise UserError(
            f"{KEY}: {error.filename or run_folder} cannot be written: {error.strerror}"
        ) from None


def replacement(config: RunConfig, say: Callable[[str], None]) -> Callable[[Path, int], bool] | None:
    """Return what puts the storage's copy in a damaged checkpoint's place; None without a storage."""
    url = config.checkpoint.remote
    return None if url is None else partial(replace_damaged, RemoteFolder(url, config.name), say)


def replace_damaged(remote: RemoteFolder, say: Callable[[str], None], path: Path, inode: int) -> bool:
    """Put the storage's copy in the place of a damaged local checkpoint; return whether one is there now.

    One process of those that see the folder does it, the others wait. Otherwise a line says why not, and all
    stays as it is. inode: that of the damaged folder, see `folder.inode_of`.
    """
    try:
        with _fetch_lock(path.parent.parent):
            if inode_of(path) == inode:  # else another process has done it
                name = _copy_of(remote, path)
                if name is None:
                    say(f"{KEY}: {remote.url} has no copy of {path.name}")
                    return False
                temporary = _download(remote, name, path.parent, say)
                if temporary is None:
                    return False
                _put(temporary, path, say)
    except (object_storage.RemoteError, OSError) as error:
        say(f"{KEY}: {path.name} cannot be fetched from {remote.url}: {object_storage.reason_of(error)}")
        return False
    say(f"{KEY}: fetched {path.name} from {remote.url} in place of the damaged one")
    return True


def _copy_of(remote: RemoteFolder, path: Path) -> str | None:
    """Return the storage's copy of a local checkpoint: the same list of checksums, as long as it has one."""
    names = [name for name in remote.complete() if name.partition("-")[0] == path.name]
    try:
        listed = files.read_bytes(path / SUMS)
        files.parse_sums(listed)
    except (OSError, ValueError):
        return next(iter(names), None)
    return next((name for name in names if remote.read(name, SUMS, most=files.LARGEST_JSON) == listed), None)


def _fetch_lock(run_folder: Path) -> FileLock:
    """Return the lock of the process that fetches into a run's folder."""
    return FileLock(run_folder.with_name(f".{run_folder.name}.fetch.lock"), poll_interval=LOCK_POLL_S)


def step_of(name: str) -> int:
    """Return the step of a checkpoint in the storage; -1 for another name."""
    return int(name.removeprefix("step_").partition("-")[0]) if OWN_NAME.fullmatch(name) else -1


def _intact(checkpoints: Path) -> Iterator[Path]:
    """Yield the local checkpoints as `candidates` does, without those whose small files are damaged."""
    return (path for path in candidates(checkpoints) if next(files.problems(path, shares=0), None) is None)


def _later(remote: RemoteFolder, checkpoints: Path) -> list[str]:
    """Return the remote checkpoints of later steps than the newest local one, in the order of `complete`.

    Empty if the newest is not of a later step, or is a local one too: then the user has gone back from it.
    """
    own = _intact(checkpoints)
    newest = next(own, None)
    step = -1 if newest is None else read_meta(newest)["step"]
    if 0 <= step_of(remote.read_name(LATEST)) <= step:
        return []
    names = remote.complete()
    if not names or step_of(names[0]) <= step:
        return []
    listed = remote.read(names[0], SUMS, most=files.LARGEST_JSON)
    if any(files.read_bytes(path / SUMS) == listed for path in own):  # the others
        return []
    return [name for name in names if step_of(name) > step]


def _fetch(remote: RemoteFolder, run_folder: Path, say: Callable[[str], None]) -> None:
    checkpoints, name = run_folder / "checkpoints", ""
    own = next(_intact(checkpoints), None)
    for name in _later(remote, checkpoints):
        if (temporary := _download(remote, name, checkpoints, say)) is None:
            continue
        record = run_folder / METRICS_FILE
        arrived = record.with_name(f"{FETCHING}{METRICS_FILE}")
        with contextlib.suppress(FileNotFoundError):
            remote.get(arrived, METRICS_FILE)
            _set_aside(record, say)
            os.replace(arrived, record)
        step_name = name.partition("-")[0]
        _put(temporary, checkpoints / step_name, say)
        replace_file(checkpoints / LATEST, step_name.encode(), synced=True)
        later = f", of a later step than {own}" if own else ""
        say(f"{KEY}: fetched {remote.url}/{name}{later}")
        return
    if name and not own:
        problem = _known_damages(checkpoints).get(name, "damaged")
        raise UserError(
            f"{KEY}: {remote.url} has no intact checkpoint: {name}: {problem}; begin anew by overwrite=true "
            "checkpoint.resume=never, or choose another name"
        )


def _download(remote: RemoteFolder, name: str, checkpoints: Path, say: Callable[[str], None]) -> Path | None:
    """Fetch a checkpoint into a folder with a temporary name; None, with a line, if it is damaged there."""
    for left in checkpoints.glob(f"{FETCHING}*"):
        remove(left)
    temporary, known = checkpoints / f"{FETCHING}{name.partition('-')[0]}", _known_damages(checkpoints)
    temporary.mkdir(parents=True)
    problem = known.get(name) or _fetch_files(remote, name, temporary)
    if problem is None:
        return temporary
    say(f"{KEY}: damaged: {name}: {problem}")
    remove(temporary)
    replace_file(checkpoints / DAMAGES, json.dumps({**known, name: problem}).encode())
    return None


def _put(temporary: Path, final: Path, say: Callable[[str], None]) -> None:
    """Give a fetched checkpoint its name; what has it now gets another one."""
    _set_aside(final, say)
    os.replace(temporary, final)
    sync(final.parent)


def _known_damages(checkpoints: Path) -> dict[str, str]:
    """Return what another rank has just found damaged in the storage, so that it is not fetched again."""
    path = checkpoints / DAMAGES
    with contextlib.suppress(FileNotFoundError, ValueError):
        if time.time() - path.stat().st_mtime < DAMAGES_HOLD_S:
            return {name: str(problem) for name, problem in files.read_json(path).items()}
    return {}


def _set_aside(path: Path, say: Callable[[str], None]) -> None:
    """Rename what is there, if anything is; no run deletes it under its new name."""
    if path.exists():
        aside = path.rename(unused_name(path))
        say(f"{KEY}: {path} is {aside.name} now")


def _fetch_files(remote: RemoteFolder, name: str, folder: Path) -> str | None:
    """Fetch the files that SHA256SUMS lists; return what is wrong with them, if anything is."""
    content = remote.read(name, SUMS, most=files.LARGEST_JSON)
    try:
        sums = files.parse_sums(content or b"")
    except ValueError as error:
        return f"{SUMS}: {error}"
    (folder / SUMS).write_bytes(content or b"")

    def fetch(file: str) -> str | None:
        try:
            remote.get(folder / file, name, file)
        except FileNotFoundError:
            return f"{file}: missing"
        sync(folder / file)
        return None

    with ThreadPoolExecutor(STREAMS) as pool:
        missing = next((it for it in pool.map(fetch, sums) if it), None)
    return missing or next(files.problems(folder), None)
