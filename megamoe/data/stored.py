"""Prepared datasets in object storage: local copies of their small files, stubs for the large ones.

ROOT/s3/bucket/folder/corpus/3f9a.../   a version of the dataset s3://bucket/folder/corpus
    corpus.idx, corpus.card.json        fetched whole
    corpus.bin.remote, corpus.bin.blocks/   in place of corpus.bin, see `blocks.py`
    complete                            the dataset's URL; written last

A version is named by the sizes and states of the dataset's objects. So a dataset that is replaced in the
storage gets another folder, and a run that reads the earlier one finds out when it fetches a block.
"""

import copy
import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import TypeAdapter

from megamoe.config.schema import DataConfig, SourceConfig
from megamoe.data.block_cache import NO_SPACE, BlockCache, locked
from megamoe.data.blocks import BLOCK_BYTES, DIGITS, Stub, state_of
from megamoe.data.card import LABELLED, LARGEST_CARD, BlockedCard, FileCard, fits_checksum
from megamoe.data.remote import told
from megamoe.data.tokenizers import is_bytes
from megamoe.errors import UserError, printable
from megamoe.io import TEMPORARY, read_json, read_plain, reason, replace_file, sync
from megamoe.object_storage import WAITS_S, attempt, has_credentials, is_url, open_system, without_credentials

KEY = "data.remote_cache"
COMPLETE = "complete"
# The files of a dataset: of text, of conversations, and of both sides of pairs.
FILES = re.compile(r"(\.source|\.target)?\.((learned\.)?bin|idx|(card|chat|pairs)\.json)")
# Where the card of a large file describes it: the card's ending, and its key.
CARDS = {".learned.bin": (".chat.json", "learned"), ".bin": (".card.json", "bin")}
TOLD_FROM_BYTES = 1 << 30
LONGEST_URL = 1 << 12


def cache_root(data: DataConfig) -> Path:
    """Return `data.remote_cache`, or megamoe's folder in the user's cache."""
    if data.remote_cache:
        return Path(data.remote_cache)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megamoe" / "data"


def localized(data: DataConfig) -> DataConfig:
    """Return the configuration with the path of a local copy in place of each URL; itself without URLs.

    What is not here yet is fetched. Every process of a machine may call it at the same time.

    Raises:
        UserError: if a URL names no dataset, holds credentials, or cannot be reached; if the folder cannot be
            written.
    """
    if data.mock or not any(is_url(source.path) for source in all_sources(data)):
        return data
    found, root = copy.deepcopy(data), cache_root(data)
    try:
        BlockCache(root).limit(int(data.remote_cache_gb * 1e9))
        for source in all_sources(found):
            if is_url(source.path):
                source.path = str(local_copy(source.path, root))
    except OSError as error:
        raise unwritable(root, error) from None
    return found


def all_sources(data: DataConfig) -> list[SourceConfig]:
    """Return the sources of all sets."""
    return [source for sources in (data.sources, *data.validation.values()) for source in sources]


def local_copy(url: str, root: Path) -> Path:
    """Return the prefix of the local copy of a dataset, which is made if it is not there.

    Raises:
        UserError: as `localized`.
        OSError: if it cannot be written.
    """
    if has_credentials(url) or "?" in url:
        raise UserError(
            f"data {without_credentials(url)!r} holds credentials; give them by the environment or a file"
        )
    if url.endswith(LABELLED):
        raise UserError(f"data {url!r}: examples with labels are read from a local disk; copy the file there")
    with told(url, "data"):
        system, path = open_system(url)
        objects = _objects(system, path)
    if not objects:
        raise UserError(f"data {url!r}: there is no object {url}.idx; upload all files of a prepared dataset")
    scheme, name = url.partition("://")[0].lower(), PurePosixPath(path).name
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    states = sorted((ending, state_of(info)) for ending, info in objects.items())
    version = hashlib.sha256(json.dumps([url, states]).encode()).hexdigest()[:16]
    folder = Path(root, scheme, *parts, version)
    if not (folder / COMPLETE).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            if not (folder / COMPLETE).is_file():
                _Fetching(system, url, path, folder, objects).all(root)
                replace_file(folder / COMPLETE, url.encode(), synced=True)
    return folder / name


def beside(prefix: str, name: str, data: DataConfig) -> str:
    """Return the prefix of the dataset `name` in the folder of another one.

    Beside the local copy of a dataset in object storage there is none: it is fetched from its folder there.

    Raises:
        UserError: as `localized`.
    """
    path = Path(prefix)
    try:
        url = read_plain(path.parent / COMPLETE, LONGEST_URL).decode()
    except (OSError, ValueError):
        url = ""
    if not is_url(url):
        return str(path.with_name(name))
    root = cache_root(data)
    try:
        return str(local_copy(f"{url.rpartition('/')[0]}/{name}", root))
    except OSError as error:
        raise unwritable(root, error) from None


def _objects(system: Any, path: str) -> dict[str, dict[str, Any]]:
    """Return what the storage says of the dataset's objects, by the endings of their names."""

    def ask() -> dict[str, dict[str, Any]]:
        stem = PurePosixPath(path).name
        found = {PurePosixPath(name).name.removeprefix(stem): name for name in system.glob(f"{path}.*")}
        return {
            ending: system.info(name) for ending, name in sorted(found.items()) if FILES.fullmatch(ending)
        }

    return attempt(ask, WAITS_S, passes=(FileNotFoundError,))


class _Fetching:
    """Makes a local copy of one version of a dataset; objects: by the endings of their names."""

    def __init__(
        self, system: Any, url: str, path: str, folder: Path, objects: dict[str, dict[str, Any]]
    ) -> None:
        self._system, self._url, self._path, self._objects = system, url, path, objects
        self._folder, self._name = folder, PurePosixPath(path).name

    def all(self, root: Path) -> None:
        """Fetch the small files, cards first, and write the stubs for the large ones."""
        cards = {ending: self._card(ending) for ending in self._objects if ending.endswith(".json")}
        for ending, info in self._objects.items():
            if ending.endswith(".idx"):
                card = cards.get(ending.removesuffix(".idx") + ".card.json")
                self._file(ending, info["size"], card["idx"].sha256 if card else None)
            elif ending.endswith(".bin"):
                self._stub(ending, info, cards, root)
        for card in cards.values():
            self._tokenizer(card.get("tokenizer"))

    def _card(self, ending: str) -> dict[str, Any]:
        """Fetch a card; return its content, in which what is read of files is checked."""
        local = self._file(ending, self._objects[ending]["size"])
        try:
            content = read_json(local, LARGEST_CARD)
            kinds = {"idx": FileCard, **{k: BlockedCard for of, k in CARDS.values() if ending.endswith(of)}}
            if isinstance(content, dict) and fits_checksum(content):
                return content | {
                    key: TypeAdapter[FileCard](kind).validate_python(content.get(key) or kind(0, ""))
                    for key, kind in kinds.items()
                }
            problem = "its content does not fit its checksum"
        except (OSError, ValueError) as error:
            problem = printable(reason(error))
        raise UserError(f"data card {self._url + ending!r} is damaged: {problem}; upload the right file")

    def _file(self, ending: str, size: int, expected: str | None = None) -> Path:
        """Fetch a file whole; expected: its SHA-256, if its card says it."""
        local = self._folder / f"{self._name}{ending}"
        if size > TOLD_FROM_BYTES:
            print(f"data: fetching {self._url}{ending}, {size / 1e9:.1f} GB", flush=True)
        found = ""
        for _ in range(2):  # it may have been damaged on the way
            temporary = self._fetched(f"{self._path}{ending}", local, size)
            with temporary.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest() if expected else ""
            if found == (expected or ""):
                sync(temporary)
                os.replace(temporary, local)
                return local
        raise UserError(
            f"data file {self._url + ending!r} is damaged or another dataset's: SHA-256 {found[:12]}..., its "
            f"card says {str(expected)[:12]}...; upload the right file"
        )

    def _fetched(self, path: str, local: Path, size: int | None) -> Path:
        """Fetch an object beside the place of its local copy; size: None if it is not known."""
        temporary = local.with_name(f".{local.name}{TEMPORARY}")

        def get() -> None:
            try:
                self._system.get_file(path, str(temporary))
            except OSError as error:
                if error.errno in NO_SPACE:
                    raise unwritable(local, error) from None
                raise
            found = temporary.stat().st_size
            if size not in (None, found):
                raise OSError(f"{found:,} of {size:,} bytes arrived")

        with told(self._url, "data"):
            attempt(get, WAITS_S, passes=(FileNotFoundError, UserError))
        return temporary

    def _stub(self, ending: str, info: dict[str, Any], cards: dict[str, dict[str, Any]], root: Path) -> None:
        large = max((each for each in CARDS if ending.endswith(each)), key=len)
        card, key = CARDS[large]
        found: BlockedCard = cards.get(ending.removesuffix(large) + card, {}).get(key) or BlockedCard(0, "")
        place, sums = os.path.relpath(root, self._folder), found.block_sums
        size = found.block_bytes or BLOCK_BYTES
        stub = Stub(f"{self._url}{ending}", int(info["size"]), state_of(info), place, size, sums)
        if sums and len(sums) != DIGITS * stub.num_blocks:
            raise UserError(
                f"data file {self._url + ending!r} has {info['size']} bytes, and its card checksums of "
                f"{len(sums) // DIGITS} blocks, expected {stub.num_blocks}; upload the right files"
            )
        stub.save(self._folder / f"{self._name}{ending}")

    def _tokenizer(self, card: Any) -> None:
        """Fetch the tokenizer that a card names relative to its folder, a file or a folder, if there."""
        reference = PurePosixPath(str(card.get("reference", "")) if isinstance(card, dict) else "")
        is_outside = reference.is_absolute() or ".." in reference.parts[1:]
        if is_outside or is_bytes(str(reference)) or reference.name in ("", ".."):
            return
        base = os.path.normpath(PurePosixPath(self._path).parent / reference)
        with told(self._url, "data"), suppress(FileNotFoundError):
            for name in attempt(lambda: self._system.find(base), WAITS_S, passes=(FileNotFoundError,)):
                rest = PurePosixPath(name[len(base) :].lstrip("/"))
                if ".." in rest.parts:  # which a name in a bucket may hold: outside of the folder
                    continue
                local = self._folder.joinpath(reference, *rest.parts)
                local.parent.mkdir(parents=True, exist_ok=True)
                os.replace(self._fetched(name, local, None), local)


def unwritable(path: Path, error: OSError) -> UserError:
    """Return the error for a folder of local copies that cannot be written."""
    return UserError(
        f"{KEY}: {error.filename or path} cannot be written: {error.strerror or error}; name a folder on a "
        "local disk with free space"
    )


def source_line(original: DataConfig, data: DataConfig) -> str:
    """Return where the training data comes from, for people; data: `localized`."""
    if data.mock:
        return "mock data"
    names = [source.path for source in original.sources]
    line = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    if data is original or not any(map(is_url, names)):
        return line
    return f"{line}; blocks are kept in {cache_root(data)}, at most {data.remote_cache_gb:g} GB"
