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
    """Inside, these attributes of a module, a class or an object have other values.

    What the owner does not have itself, such as what an object has from its class, is deleted at the end.
    """
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
