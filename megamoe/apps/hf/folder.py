"""A Hugging Face folder: config.json, sharded safetensors with their index, tokenizer files.

`tokenizer_files` makes those of a run that was never imported, as transformers reads them.
"""

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from megamoe.apps.checkpoints.stream import Stored
from megamoe.apps.hf.tensor_files import broken, read_header, read_tensor
from megamoe.checkpoint.format.files import parse_json
from megamoe.config import RunConfig
from megamoe.data.card import load_card
from megamoe.data.special import PAD_NAMES, SpecialTokens
from megamoe.data.stored import localized
from megamoe.data.tokenizers import END_OF_DOCUMENT_NAMES, is_bytes, load_tokenizer
from megamoe.errors import UserError, printable
from megamoe.io import read_plain, real, reason

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_MAP = "weight_map"
TOKENIZER, TOKENIZER_CONFIG, SENTENCEPIECE = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
CHAT_TEMPLATE, OLD_CHAT_TEMPLATE = "chat_template.jinja", "chat_template.json"
LARGEST_JSON, LARGEST_FILE = 1 << 28, 1 << 27  # bytes; the largest tokenizers of the hub have 35 MB
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # of the hub's cache: snapshots/REVISION/NAME is a link into blobs/
# What a tokenizer of transformers may consist of; no code is among it.
TOKENIZER_FILES = (
    TOKENIZER,
    TOKENIZER_CONFIG,
    SENTENCEPIECE,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    CHAT_TEMPLATE,
    OLD_CHAT_TEMPLATE,
)
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Folder:
    """An open folder. Only the headers of its tensor files are read.

    path: the folder. config: the content of config.json. tensors: dtype and shape of each tensor by name.

    Raises (when built):
        UserError: if a file is missing or damaged, or the tensors are not those that the index names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise UserError(f"{path}: no folder; name one with {CONFIG} and safetensors files")
        self.config = read_object(path / CONFIG)
        self._files: dict[str, Path] = {}
        self.tensors: dict[str, Stored] = {}
        for file in self._weight_files():
            for name, stored in read_header(file).items():
                if name in self.tensors:
                    raise broken(file, f"{name} is also in {self._files[name].name}")
                self.tensors[name], self._files[name] = stored, file
        self._check_index()

    def read(self, name: str) -> Tensor:
        """Return a tensor of `tensors`.

        Raises:
            UserError: if its file no longer holds it.
        """
        return read_tensor(self._files[name], name)

    def _weight_files(self) -> list[Path]:
        self._index = self._read_index()
        if self._index is not None:
            return [checked_link(self.path / name) for name in sorted(set(self._index.values()))]
        if (self.path / WEIGHTS).exists():
            return [checked_link(self.path / WEIGHTS)]
        others = sorted(file.name for file in self.path.glob("*.bin"))
        found = f"only {others[0]}, which is pickled and not read" if others else "none of them"
        raise UserError(f"{self.path}: expected {WEIGHTS} or {WEIGHTS_INDEX}, found {found}")

    def _read_index(self) -> dict[str, str] | None:
        path = self.path / WEIGHTS_INDEX
        if not path.exists():
            return None
        named = read_object(path).get(WEIGHT_MAP)
        if not isinstance(named, dict) or not named:
            raise broken(path, f"no {WEIGHT_MAP}")
        for file in named.values():
            if not isinstance(file, str) or PurePath(file).name != file or not file.endswith(".safetensors"):
                raise broken(path, f"{file!r} is no safetensors file of this folder")
        return named

    def _check_index(self) -> None:
        if self._index is None:
            return
        path = self.path / WEIGHTS_INDEX
        for name, file in self._index.items():
            if name not in self.tensors or self._files[name].name != file:
                raise broken(path, f"{name} is not in {file}, which {WEIGHT_MAP} names")
        for name in self.tensors:
            if name not in self._index:
                raise broken(self._files[name], f"{name} is not in {WEIGHTS_INDEX}")


def read_other_files(path: Path) -> dict[str, bytes]:
    """Return the generation's configuration and the tokenizer's files of a folder by name, as they are.

    Raises:
        UserError: if one cannot be read or parsed, has more than 128 MiB, or is a link to elsewhere.
    """
    found = {
        name: _content(path / name, LARGEST_FILE)
        for name in (GENERATION, *TOKENIZER_FILES)
        if (path / name).exists()
    }
    for name, content in found.items():
        try:
            if name == TOKENIZER:
                Tokenizer.from_str(content.decode())
            elif name.endswith(".json"):
                parse_json(content)
        except Exception as error:  # the library's own have no narrower type
            raise broken(path / name, error) from None
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object that a file of a folder holds.

    Raises:
        UserError: if it is missing, too large, or no JSON object.
    """
    content = _content(path, LARGEST_JSON)
    try:
        return parse_json(content)
    except ValueError as error:
        raise broken(path, error) from None


def checked_link(path: Path) -> Path:
    """Return the path of a file in a folder, if it lies there; only the hub's cache may link elsewhere.

    Raises:
        UserError: if it is a link out of the folder, and not from a snapshot to its repository's blobs.
    """
    folder, target = real(path.parent), real(path)
    places = [folder]
    if folder.parent.name == SNAPSHOTS:
        places.append(folder.parent.parent / BLOBS)
    if not any(target.is_relative_to(place) for place in places):
        raise UserError(
            f"{path}: a link to {target}, outside its folder; copy the file into the folder, if you trust it"
        )
    return path


def _content(path: Path, largest: int) -> bytes:
    checked_link(path)
    try:
        return read_plain(path, largest)
    except (OSError, ValueError) as error:
        raise broken(path, reason(error)) from None


def portable(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json without the keys that belong to code or a quantisation, which are not kept."""
    return {name: value for name, value in config.items() if name not in ("auto_map", "quantization_config")}


def dtype_name(tensors: Mapping[str, Stored]) -> str:
    """Return the dtype of most elements, as transformers writes it: `bfloat16`."""
    count: dict[str, int] = {}
    for stored in tensors.values():
        name = str(stored.dtype).removeprefix("torch.")
        count[name] = count.get(name, 0) + stored.num_bytes // stored.dtype.itemsize
    return max(count, key=lambda name: (count[name], name))


def short(name: str) -> str:
    """Return a tensor's or a key's name for a message: printable, at most 120 characters."""
    return printable(name, 120)


def tokenizer_files(config: RunConfig) -> dict[str, bytes]:
    """Return the files by name; none if the tokenizer is not of Hugging Face's kinds, or its files are gone.

    Those of a folder, a tokenizer.json or a SentencePiece model are copied. tokenizer_config.json names the
    class, the last token and the longest sequence, where it does not yet.
    """
    reference = tokenizer_reference(config)
    if reference is None or is_bytes(reference) or not (path := Path(reference)).exists():
        return {}
    try:
        found, about = _tokenizer_of(path)
    except (OSError, ValueError, AttributeError, TypeError, KeyError, RuntimeError):
        return {}
    if not found:
        return {}
    about = {"model_max_length": config.data.sequence_length, **about}
    if TOKENIZER_CONFIG in found:
        about |= parse_json(found[TOKENIZER_CONFIG])
    return {**found, TOKENIZER_CONFIG: (json.dumps(about, indent=2) + "\n").encode()}


def _tokenizer_of(path: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the files of a tokenizer by name, and what its tokenizer_config.json must say."""
    if path.is_dir():
        found = read_other_files(path)
        found.pop(GENERATION, None)
        return found, {}
    if path.suffix == ".json":
        content = read_plain(path, LARGEST_FILE)
        known = {token["content"] for token in parse_json(content).get("added_tokens", [])}
        about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        for name, spellings in (("eos_token", END_OF_DOCUMENT_NAMES), ("pad_token", PAD_NAMES)):
            if spelling := next(filter(known.__contains__, spellings), None):
                about[name] = spelling
        return {TOKENIZER: content}, about
    if path.suffix == ".model":
        about = {"eos_token": load_tokenizer(str(path)).eod_text, "unk_token": "<unk>"}
        return {SENTENCEPIECE: read_plain(path, LARGEST_FILE)}, about
    return {}, {}


def special_ids(config: RunConfig) -> dict[str, int | None]:
    """Return the ids that end, begin and fill a text, by their keys of config.json.

    The end is the end-of-document token of the run's tokenizer. None: there is no such token. Each key is
    there: transformers would otherwise take the ids of the class's first model, which are other tokens here.
    """
    found: dict[str, int | None] = dict.fromkeys(SPECIAL_IDS)
    try:
        if config.data.tokenizer is not None:
            tokenizer = load_tokenizer(config.data.tokenizer)
            eod, special = tokenizer.eod, tokenizer.special
        elif config.data.sources and (card := load_card(first_source(config))) is not None:
            eod, special = card.tokenizer.eod, SpecialTokens(card.tokenizer.special)
        else:
            return found
    except UserError:  # it is no longer there
        return found
    return found | {"eos_token_id": eod, "pad_token_id": special.pad}


def tokenizer_reference(config: RunConfig) -> str | None:
    """Return the tokenizer that `data.tokenizer` or the card of the first source names; None: neither."""
    if config.data.tokenizer is not None or not config.data.sources:
        return config.data.tokenizer
    try:
        source = first_source(config)
        card = load_card(source)
    except UserError:
        return None
    if card is None:
        return None
    reference = card.tokenizer.reference
    return reference if is_bytes(reference) else str(Path(source).parent / reference)


def first_source(config: RunConfig) -> str:
    """Return the prefix of the first of `data.sources`, on a disk."""
    return localized(config.data).sources[0].path
