"""Plants a defect in the running process, and marks tests that must fail with it.

A defect is an edit of source text: `Edit(module, before, after)`. The edited module is compiled, and the
functions of the running one get the code of their edited namesakes, wherever they are referred to. The files
stay as they are.
"""

import importlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests.support.ranks.pool import Pool, RankError

LEFT_WAITING = ("did not answer", "Connection closed by peer")  # the other rank is elsewhere, or gone
HANG_S = 25.0  # with a defect; the jobs take a second or two
ACTIVE: list["Edit"] = []  # what is planted in this process now, for the ranks of a pool


@dataclass(frozen=True)
class Edit:
    """module: its dotted name. before: text that occurs once in its source; after: what takes its place."""

    module: str
    before: str
    after: str


def fails_with(*edits: Edit) -> pytest.MarkDecorator:
    """Run a test as it is, and among the full tests once more with these edits, where it must fail."""
    failures = (AssertionError, RankError)
    mark = pytest.mark.xfail(strict=True, raises=failures, reason="the defect is planted")
    planted_too = pytest.param(edits, id="planted", marks=[pytest.mark.full, mark])
    return pytest.mark.parametrize("defect", [pytest.param((), id="as it is"), planted_too], indirect=True)


@contextmanager
def planted(*edits: Edit) -> Iterator[None]:
    """Context in which the functions of the edited modules run the edited code.

    Raises:
        ValueError: if an edit's text does not occur once, or if it changes no function that is found.
    """
    with ExitStack() as stack:
        for module in dict.fromkeys(edit.module for edit in edits):
            stack.enter_context(_planted(module, [edit for edit in edits if edit.module == module]))
        ACTIVE.extend(edits)
        stack.callback(ACTIVE.clear)
        yield


def on_ranks(pool: Pool, job: Callable[..., Any], *arguments: Any, ranks: int, hangs: bool = False) -> Any:
    """Return what `pool.run` returns; the ranks have the defect that is planted here, and hang no longer.

    hangs: the defect shows in a rank that waits for another one in vain. Any other end of a job with a defect
    is no proof that the test notices the defect, so it is no RankError.
    """
    timeout_s = HANG_S if ACTIVE and hangs else 120.0
    try:
        return pool.run(with_edits, tuple(ACTIVE), job, arguments, ranks=ranks, timeout_s=timeout_s)
    except RankError as error:
        if ACTIVE and not (hangs and any(words in str(error) for words in LEFT_WAITING)):
            raise RuntimeError(f"the planted defect ended the ranks:\n{error}") from None
        raise


def edits_of(test: Any) -> tuple[Edit, ...]:
    """Return what `fails_with` plants for a test."""
    [planted_too] = [mark.args[1][1] for mark in test.pytestmark if mark.args[:1] == ("defect",)]
    edits: tuple[Edit, ...] = planted_too.values[0]
    return edits


def with_edits(edits: tuple[Edit, ...], job: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Job: do another one with edits planted."""
    with planted(*edits):
        return job(*arguments)


@contextmanager
def _planted(name: str, edits: list[Edit]) -> Iterator[None]:
    module = importlib.import_module(name)
    source = edited = inspect.getsource(module)
    for edit in edits:
        if (count := source.count(edit.before)) != 1:
            raise ValueError(f"expected {edit.before!r} once in {name}, found it {count} times")
        edited = edited.replace(edit.before, edit.after)
    old, new = (_codes(compile(text, str(module.__file__), "exec")) for text in (source, edited))
    changed: list[tuple[FunctionType, CodeType]] = []
    for function in _functions(module):
        code = function.__code__
        lines = [each.co_firstlineno for each in old[code.co_qualname]]
        if code.co_firstlineno not in lines:
            continue  # made at run time, under a name of the module
        place = lines.index(code.co_firstlineno)
        if _content(new[code.co_qualname][place]) != _content(old[code.co_qualname][place]):
            changed.append((function, code))
            function.__code__ = new[code.co_qualname][place]
    if not changed:
        raise ValueError(f"the edits of {name} change no function: {edits}")
    try:
        yield
    finally:
        for function, code in changed:
            function.__code__ = code


def _codes(code: CodeType) -> dict[str, list[CodeType]]:
    """Return the code of all functions by qualified name; a property's getter and setter share one."""
    found: dict[str, list[CodeType]] = defaultdict(list)
    waiting = [code]
    while waiting:
        current = waiting.pop(0)
        found[current.co_qualname].append(current)
        waiting += [each for each in current.co_consts if isinstance(each, CodeType)]
    return found


def _content(code: CodeType) -> tuple[Any, ...]:
    """Return what a function does, without its lines."""
    consts = tuple(_content(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.co_code, consts, code.co_names, code.co_varnames


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions and methods that a module defines, those under decorators too."""
    classes = [each for each in vars(module).values() if inspect.isclass(each)]
    owned = [each for each in classes if each.__module__ == module.__name__]
    for value in [*vars(module).values(), *(value for each in owned for value in vars(each).values())]:
        for part in (value, *(getattr(value, name, None) for name in ("fget", "fset", "__func__"))):
            while part is not None:
                if isinstance(part, FunctionType) and part.__module__ == module.__name__:
                    yield part
                part = getattr(part, "__wrapped__", None)
