"""What megamoe relies on in other libraries beyond their public interface, a module for each library.

A patch, an attribute that begins with an underscore, an internal list, a text of an error message: all of
these may change with any release. Each is behind a function or class here that says why it is needed, the
versions it was seen with, what happens without it, and which test in tests/compat fails when it is no longer
needed or no longer fits.

`startup` has the supported versions and is called first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, these attributes of a module or class have other values.

    Raises:
        KeyError: if it has none of that name itself; what a class inherits does not count.
    """
    before = {name: vars(owner)[name] for name in values}  # a classmethod, not the bound method
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
