"""What a planted fault is; `faults.py` has them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """An edit that breaks a promise.

    name: for the command line. promise: what the page says. page: relative to docs/. file: the one that is
    edited. before, after: the text, which must occur in it once, and what takes its place. tests: pytest's
    arguments that select the tests which should notice it.
    """

    name: str
    promise: str
    page: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
