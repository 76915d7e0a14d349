"""Secrets in names and arguments: what logs and trackers must not get. Standard library alone."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# As a word of a name: `WANDB_API_KEY`, `s3.secret`, `--auth-token`; not `data.tokenizer` or `monkey`.
NAMES = re.compile(
    r"(?i)(?<![a-z])(api-?key|key|keys|token|secret|secrets|passw(or)?d|passphrase|credentials?|jwt|auth)(?![a-z])"
)
# Values that are secrets whatever their name: a user and password in a URL, and well-known prefixes.
IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
VALUES = re.compile(r"\b(hf_|ghp_|github_pat_|sk-|xox[bp]-|AKIA|eyJ)[A-Za-z0-9_.\-]{12,}")
HIDDEN = "***"


def is_secret(name: str) -> bool:
    """Return whether a variable, key or option of that name may hold a secret."""
    return NAMES.search(name) is not None


def redacted(arguments: list[str]) -> list[str]:
    """Return the arguments of a command with `***` in place of secrets.

    These are the value of `name=value` or `--name value` where the name says so, and what is one by its form.
    """
    found: list[str] = []
    hides_next = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hides_next and not argument.startswith("-"):
            found.append(HIDDEN)
        elif equals and is_secret(name):
            found.append(f"{name}={HIDDEN}")
        else:
            found.append(VALUES.sub(HIDDEN, IN_URL.sub(f"{HIDDEN}@", argument)))
        hides_next = argument.startswith("-") and not equals and is_secret(argument)
    return found


@contextmanager
def without_secrets(kept: tuple[str, ...] = ()) -> Iterator[None]:
    """Hide secrets of this process' environment and arguments from what is started meanwhile.

    kept: beginnings of the names of variables that it needs nevertheless.
    """
    names = [name for name in os.environ if is_secret(name) and not name.startswith(kept or ("\0",))]
    variables, arguments = {name: os.environ.pop(name) for name in names}, list(sys.argv)
    sys.argv[:] = redacted(arguments)
    try:
        yield
    finally:
        os.environ.update(variables)
        sys.argv[:] = arguments
