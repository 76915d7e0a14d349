"""Where words begin among tokens, for any tokenizer."""

from collections.abc import Callable

import numpy as np

from megamoe.data.tokenizers import Tokenizer

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
