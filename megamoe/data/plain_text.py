"""Encoding by the `tokenizers` library without special tokens: text that spells one is ordinary text.

`encode_special_tokens` of the library only stops the search for added tokens. A unigram or word-level model,
such as those of T5 and XLM-R, then finds the token's text in its own vocabulary.
"""

import json
import secrets
from collections.abc import Collection, Iterable
from typing import Any

NOWHERE = "\U0010ffff"  # no character, so no vocabulary has it


def without_special(backend: Any, reserved: Collection[int]) -> Any:
    """Return a tokenizer that encodes text as `backend` does, but never to a reserved id.

    It is `backend` itself where no text leads to one of them. Otherwise it is a copy in which these tokens
    have random names, so ids, offsets and everything else stay. Unknown characters still give the unknown
    token.

    Args:
        backend: a `tokenizers.Tokenizer`; neither it nor the copy truncates or pads afterwards.
        reserved: the ids of special tokens.
    """
    backend.no_truncation()  # a file may turn both on, for the batches of another model
    backend.no_padding()
    backend.encode_special_tokens = True
    added = backend.get_added_tokens_decoder()
    if all(number not in added or added[number].special for number in reserved) and not any(
        _is_reached(backend, number) for number in reserved
    ):
        return backend
    content = json.loads(backend.to_str())
    names = {backend.id_to_token(number): secrets.token_hex(16) for number in reserved}
    for token in content["added_tokens"]:
        if token["id"] in reserved:
            token |= {"content": names[token["content"]], "special": True}
    _rename(content["model"], names)
    copy = type(backend).from_str(json.dumps(content))
    copy.encode_special_tokens = True
    return copy


def unknown_ids(backend: Any) -> set[int]:
    """Return the ids that a `tokenizers.Tokenizer` gives a character that its vocabulary lacks."""
    try:
        return {token.id for token in backend.model.tokenize(NOWHERE)}
    except Exception:  # the library's only class of errors: a word-level model without an unknown token
        return set()


def _is_reached(backend: Any, number: int) -> bool:
    """Whether the model encodes the text of a token, taken as a word, to this token.

    If it does so within a longer word, it does so here: each model divides a span by the span alone.
    """
    model, name = backend.model, backend.id_to_token(number)
    return model.token_to_id(name) == number and any(token.id == number for token in model.tokenize(name))


def _rename(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename tokens in the JSON of a model, and remove the merges that make or use them."""

    def renamed(pairs: Iterable[Any]) -> list[Any]:
        return [[names.get(piece, piece), value] for piece, value in pairs]

    vocabulary = model["vocab"]  # a list of a unigram model, otherwise a dictionary
    is_list = isinstance(vocabulary, list)
    model["vocab"] = renamed(vocabulary) if is_list else dict(renamed(vocabulary.items()))
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            [first, second]
            for first, second in model["merges"]
            if names.keys().isdisjoint((first, second, first + second.removeprefix(prefix)))
        ]
