"""Asks `rendering.py`: in this process for the templates of megamoe, in one of its own for any other."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from typing import Any

from megamoe.apps.chat import rendering
from megamoe.apps.chat.named_templates import NAMED
from megamoe.errors import UserError, printable

OURS = frozenset(NAMED.values())
MOST_SECONDS = 5.0  # of a processor, for a request


class BrokenTemplateError(UserError):
    """A template that no conversation is rendered with: it has code, is no Jinja, or knows no bounds."""


def ask(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of `rendering.answer`. name: the template's, in messages.

    Raises:
        BrokenTemplateError: see there.
        UserError: if the template refuses these messages, or fails with them.
    """
    reply = rendering.answer(request) if request["template"] in OURS else _bounded(request)
    if "problem" not in reply:
        return reply
    words = printable(" ".join(reply["words"].split()))
    if reply["problem"] == rendering.CODE:
        raise BrokenTemplateError(
            f"template {name}: it has code that the sandbox refuses ({words}); a template may only read the "
            "messages and the tools"
        )
    if reply["problem"] == rendering.TEMPLATE:
        raise BrokenTemplateError(f"template {name}: {words}; correct it, or name another --template")
    raise UserError(f"template {name}: {words}; change the messages or the template")


def _bounded(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of the process; it is a problem of the template if the process dies of it."""
    process = _process()
    assert process.stdin is not None and process.stdout is not None
    line = b""
    with suppress(OSError):  # it is gone
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
    if line:
        return json.loads(line)
    _process.cache_clear()  # the next request gets another one
    is_slow = (code := process.wait()) == -signal.SIGPROF
    words = f"it takes more than {MOST_SECONDS:g} s" if is_slow else f"it ended its process ({code})"
    return {"problem": rendering.TEMPLATE, "words": words}


@cache
def _process() -> subprocess.Popen[bytes]:
    """Start the process that renders templates of others; it ends with this one, which closes its input."""
    return subprocess.Popen(
        [sys.executable, "-P", rendering.__file__, str(MOST_SECONDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # BLAS would reserve memory for each thread.
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
