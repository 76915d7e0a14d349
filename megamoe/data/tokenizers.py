"""Tokenizers behind one small interface: raw bytes, tokenizer.json, Hugging Face folders, SentencePiece.

Design choices:
- every tokenizer has an end-of-document token (`eod`), since it is what marks a boundary in the data;
- text is only text: a special token spelled out inside a document is encoded as ordinary characters,
  so that no document can forge a boundary;
- reserved tokens (`special.py`) are ids that no text is encoded to;
- the network is never asked and no code from a tokenizer's folder is run;
- `fingerprint` is the identity: data and a run agree on a tokenizer when their fingerprints do.
"""

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megamoe.data.plain_text import unknown_ids, without_special
from megamoe.data.special import NOTHING_RESERVED, SpecialTokens, expand
from megamoe.errors import UserError
from megamoe.io import read_json

END_OF_DOCUMENT = "<|endoftext|>"
END_OF_DOCUMENT_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "<eod>", "</s>", "<eos>", "<|im_end|>")
NUM_BYTES = 256
SPECIAL_MARK = "+"  # between `bytes` and its reserved tokens
MOST_CONFIG_BYTES = 16 << 20
FOLDER_FILE_ENDINGS = (".json", ".txt", ".model", ".tiktoken", ".jinja")


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        name: the reference it was loaded from.
        vocab_size: number of ids; every id is smaller.
        eod: id of the end-of-document token, which `encode` never returns and `decode` leaves out.
        fingerprint: sha256 (hex) of what defines the mapping.
        special: the reserved tokens, which `encode` never returns and `decode` leaves out.
        unknown: ids of the unknown token, which `encode` returns although `special` may list it.
        eod_text: how the end-of-document token is spelled in a rendered conversation.
        named: further texts of a chat template by their names, such as `bos_token`.
        chat_template: the template (Jinja) of conversations that the tokenizer brings; None: it has none.
    """

    name: str
    vocab_size: int
    eod: int
    fingerprint: str
    special: SpecialTokens = NOTHING_RESERVED
    unknown: Collection[int] = ()
    eod_text: str = END_OF_DOCUMENT
    named: Mapping[str, str] = MappingProxyType({})
    chat_template: str | None = None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without any special token."""

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """Return the text of token ids, without special tokens."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Return `encode` of each text. Tokenizers that can parallelise it override this."""
        return [self.encode(text) for text in texts]

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return `encode` of a text, and of each token the [start, end) of its characters in the text.

        Several tokens of one character, its bytes, have spans inside its own.

        Raises:
            UserError: if the tokenizer does not know them.
        """
        raise UserError(
            f"tokenizer {self.name!r} does not say which characters its tokens are; take a tokenizer.json"
        )

    @property
    def unreachable(self) -> set[int]:
        """The ids of the end of a document and of the reserved tokens, to which no text is encoded."""
        return {self.eod, *set(self.special.ids.values()).difference(self.unknown)}

    def check_text_only(self, tokens_N: np.ndarray) -> None:
        """Raise a UserError if the tokens of a text, int [N], hold an id that no text may have."""
        wrong_N = tokens_N[np.isin(tokens_N, list(self.unreachable))]
        if wrong_N.size:
            name = next(text for text, number in self.marks.items() if number == wrong_N[0])
            raise UserError(
                f"tokenizer {self.name!r} encodes a text to the special token {name} (id {wrong_N[0]}), "
                "which would act as one; take a tokenizer.json, or remove it from the text"
            )

    @property
    def marks(self) -> dict[str, int]:
        """The ids of the end of a document and of the reserved tokens, by their texts."""
        return {self.eod_text: self.eod, **self.special.ids}

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return what `encode_with_spans` does, of a text in which the texts of `marks` are these tokens.

        It is for text that a program has put together, such as a rendered conversation.
        """
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        first = 0
        for piece in self._divided(text):
            if piece in self.marks:
                tokens.append(self.marks[piece])
                spans.append((first, first + len(piece)))
            elif piece:
                found, inside = self.encode_with_spans(piece)
                tokens += found
                spans += [(first + start, first + end) for start, end in inside]
            first += len(piece)
        return tokens, spans

    def _divided(self, text: str) -> list[str]:
        """Return the pieces of a text: each text of `marks` in it, and what stands between them."""
        longest_first = sorted(self.marks, key=len, reverse=True)
        return re.split(f"({'|'.join(map(re.escape, longest_first))})", text)


class ByteTokenizer(Tokenizer):
    """The 256 byte values of UTF-8, one end-of-document id, and the reserved tokens from 257 on.

    Its reference is `bytes`, or with reserved tokens `bytes+pad,mask,sentinels` (`special.expand`).
    """

    name = "bytes"
    eod = NUM_BYTES

    def __init__(self, special: str = "") -> None:
        names = expand(special)
        self.special = SpecialTokens({name: self.eod + 1 + place for place, name in enumerate(names)})
        self.vocab_size = self.eod + 1 + len(names)
        mapping = "megamoe bytes: 256 values, eod 256"
        if names:
            self.name = f"{ByteTokenizer.name}{SPECIAL_MARK}{special}"
            mapping += ", " + " ".join(names)
        self.fingerprint = hashlib.sha256(mapping.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        spans = [(place, place + 1) for place, char in enumerate(text) for _ in char.encode("utf-8")]
        return self.encode(text), spans

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < NUM_BYTES).decode("utf-8", errors="replace")


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json` of the Hugging Face `tokenizers` library."""

    _backend: Any  # decodes, and encodes text with special tokens
    _plain: Any  # encodes text

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Backend

        self.name = str(path)
        self.fingerprint = _sha256_of([path])
        backend = Backend.from_file(str(path))
        vocabulary = backend.get_vocab(with_added_tokens=True)
        known = [name for name in END_OF_DOCUMENT_NAMES if name in vocabulary]
        if not known:
            raise UserError(
                f"tokenizer {self.name!r} has no end-of-document token, expected one of "
                f"{', '.join(END_OF_DOCUMENT_NAMES)}; add it as a special token"
            )
        self.eod_text = known[0]
        self.eod = vocabulary[self.eod_text]
        self.vocab_size = max(vocabulary.values()) + 1
        self.special = _reserved(backend.get_added_tokens_decoder(), self.eod)
        self._set_backend(backend)

    def _set_backend(self, backend: Any) -> None:
        """Encode and decode by a `tokenizers.Tokenizer`; eod and special are known."""
        self._backend = backend
        self._plain = without_special(backend, {self.eod, *self.special.ids.values()})
        self.unknown = unknown_ids(backend)

    def encode(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [one.ids for one in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._plain.encode(text, add_special_tokens=False)
        return list(found.ids), list(found.offsets)

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        self._backend.encode_special_tokens = False
        try:
            found = self._backend.encode(text, add_special_tokens=False)
        finally:
            self._backend.encode_special_tokens = True
        if self._plain is not self._backend:  # its normalization may make a mark of other characters
            marks = sum(piece in self.marks for piece in self._divided(text))
            special_N = np.isin(found.ids, list(self.unreachable))
            if special_N.sum() > marks:
                self.check_text_only(np.array(found.ids)[special_N])
        return list(found.ids), list(found.offsets)

    def decode(self, tokens: list[int]) -> str:
        return str(self._backend.decode(tokens, skip_special_tokens=True))


class FolderTokenizer(JsonTokenizer):
    """A Hugging Face folder, read by transformers' AutoTokenizer from local files only.

    Few have no tokenizer of the `tokenizers` library. Text that spells a special token is refused with these.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        self.name = str(path)
        self.fingerprint = _sha256_of(
            sorted(file for file in path.iterdir() if file.is_file() and file.suffix in FOLDER_FILE_ENDINGS)
        )
        self._whole: Any = AutoTokenizer.from_pretrained(
            str(path),
            config=_config_of_no_class(path / "config.json"),
            local_files_only=True,
            trust_remote_code=False,
            split_special_tokens=True,
        )
        if self._whole.eos_token_id is None:
            raise UserError(
                f"tokenizer {self.name!r} has no end-of-document token; "
                "set eos_token in its tokenizer_config.json"
            )
        self.eod = int(self._whole.eos_token_id)
        self.vocab_size = max(self._whole.get_vocab().values()) + 1
        self.special = _reserved(self._whole.added_tokens_decoder, self.eod)
        self.eod_text = str(self._whole.eos_token)
        named = self._whole.special_tokens_map
        self.named = {name: text for name, text in named.items() if isinstance(text, str)}
        template = self._whole.chat_template
        self.chat_template = template.get("default") if isinstance(template, dict) else template
        if self._whole.is_fast:
            self._set_backend(self._whole.backend_tokenizer)
        elif self._whole.unk_token_id is not None:
            self.unknown = {self._whole.unk_token_id}

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        if self._whole.is_fast:
            return super().encode_batch(texts)
        # verbose=False: documents longer than a model's context are the normal case here.
        encoded = self._whole(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for ids in encoded["input_ids"]:
            self.check_text_only(np.array(ids))
        return [list(ids) for ids in encoded["input_ids"]]

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        kind = JsonTokenizer if self._whole.is_fast else Tokenizer
        return kind.encode_with_spans(self, text)

    def encode_marked(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        kind = JsonTokenizer if self._whole.is_fast else Tokenizer
        return kind.encode_marked(self, text)

    def decode(self, tokens: list[int]) -> str:
        return str(self._whole.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model` with an </s>; the model's own normalisation may change spaces."""

    def __init__(self, path: Path) -> None:
        from sentencepiece import SentencePieceProcessor

        self.name = str(path)
        self.fingerprint = _sha256_of([path])
        self._backend = SentencePieceProcessor(model_file=str(path))
        self.eod = self._backend.eos_id()
        self.vocab_size = self._backend.get_piece_size()
        if self.eod < 0:
            raise UserError(f"tokenizer {self.name!r} has no </s> to end a document; train it with an eos_id")
        self.eod_text = self._backend.id_to_piece(self.eod)
        # No text is encoded to a control symbol, such as that of eos_id; to user-defined symbols it is.
        ids = [number for number in range(self.vocab_size) if self._backend.is_control(number)]
        self.special = SpecialTokens({self._backend.id_to_piece(i): i for i in ids if i != self.eod})

    def encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text))

    def encode_with_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found: Any = self._backend.encode(text, out_type="offset_mapping")
        return list(found["ids"]), list(found["offsets"])

    def decode(self, tokens: list[int]) -> str:
        return str(self._backend.decode([token for token in tokens if token != self.eod]))


def is_bytes(reference: str) -> bool:
    """Return whether a reference names the byte tokenizer, which is no file."""
    return reference == ByteTokenizer.name or reference.startswith(ByteTokenizer.name + SPECIAL_MARK)


def load_tokenizer(reference: str) -> Tokenizer:
    """Load the tokenizer that `reference` names.

    reference: `bytes` (or `bytes+pad,mask` and the like), a `tokenizer.json`, a Hugging Face folder or a
    SentencePiece `.model`.

    Raises:
        UserError: if there is no such file, if it cannot be read, or if it has no end-of-document token.
    """
    if is_bytes(reference):
        return ByteTokenizer(reference.removeprefix(ByteTokenizer.name).removeprefix(SPECIAL_MARK))
    path = Path(reference)
    expected = "expected 'bytes', a tokenizer.json, a Hugging Face folder or a SentencePiece .model"
    if not os.path.exists(path):
        raise UserError(f"tokenizer {reference!r} does not exist; {expected}")
    if not (path.is_dir() or path.is_file()):  # a device never ends
        raise UserError(f"tokenizer {reference!r} is a pipe, device or socket; {expected}")
    kinds: dict[str, Any] = {".json": JsonTokenizer, ".model": SentencePieceTokenizer}
    kind = FolderTokenizer if path.is_dir() else kinds.get(path.suffix)
    if kind is None:
        raise UserError(f"tokenizer {reference!r} is of no known kind; {expected}")
    try:
        return kind(path)
    except UserError:
        raise
    except Exception as error:
        # The libraries raise anything from RuntimeError to bare Exception on a broken file.
        reason = " ".join(str(error).split())
        raise UserError(f"tokenizer {reference!r} cannot be read: {reason}; {expected}") from error


def _config_of_no_class(path: Path) -> Any:
    """Return an empty configuration, if a config.json names a class that transformers does not have.

    transformers reads such a file as one of the base class, and fails at rotary positions with a scaling
    (Kimi K2). None: it has the class, or there is no file.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    content = read_json(path, MOST_CONFIG_BYTES) if path.exists() else {}
    named = content.get("model_type") if isinstance(content, dict) else None
    return PreTrainedConfig() if isinstance(named, str) and named not in CONFIG_MAPPING else None


def _reserved(added_tokens: Mapping[int, Any], eod: int) -> SpecialTokens:
    """Return the added tokens that are special; an ordinary token may be spelled <mask> as well."""
    found = sorted(item for item in added_tokens.items() if item[1].special and item[0] != eod)
    return SpecialTokens({token.content: number for number, token in found})


def _sha256_of(paths: list[Path]) -> str:
    """Return one digest over the suffixes and the contents of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.suffix} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


ANCHOR = "a"  # a word that a token is put behind, to see whether it continues it
UNKNOWN = "\ufffd"  # bytes that are only a part of a character


def word_starts(tokenizer: Tokenizer) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from token ids, int [N], to where words begin, bool [N].

    A token continues a word if the text of the token before it ends, and its own begins, with a letter, a
    digit, an underscore or a part of a character. So punctuation is a word of its own, and `bytes` has words
    too. Every id is decoded once, so a tokenizer of any kind will do.
    """
    anchor = tokenizer.encode(ANCHOR)
    before = tokenizer.decode(anchor)
    begins_V, ends_V = (np.zeros(tokenizer.vocab_size, dtype=bool) for _ in range(2))
    for number in range(tokenizer.vocab_size):
        text = tokenizer.decode([*anchor, number])
        piece = text[len(before) :] if text.startswith(before) else text
        if piece:
            begins_V[number], ends_V[number] = _is_inside(piece[0]), _is_inside(piece[-1])

    def starts(tokens_N: np.ndarray) -> np.ndarray:
        known_N = np.minimum(tokens_N, tokenizer.vocab_size - 1)
        joined_N = begins_V[known_N][1:] & ends_V[known_N][:-1]
        return np.concatenate((np.ones(min(1, len(tokens_N)), dtype=bool), ~joined_N))

    return starts


def _is_inside(character: str) -> bool:
    return character.isalnum() or character in ("_", UNKNOWN)
