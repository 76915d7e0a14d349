"""Asks `rendering.py`: in this process for the templates of megamoe, in one of its own for any other."""

import atexit
import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from typing import Any

from megamoe.apps.chat import rendering
from megamoe.apps.chat.named_templates import NAMED
from megamoe.errors import UserError, printable

OURS = frozenset(NAMED.values())


class BrokenTemplateError(UserError):
    """A template that no conversation is rendered with: it has code, is no Jinja, or knows no bounds."""


def ask(name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of `rendering.answer`. name: the template's, in messages.

    Raises:
        BrokenTemplateError: see there.
        UserError: if the template refuses these messages, or fails with them.
    """
    reply = rendering.answer(request) if request["template"] in OURS else _process().ask(request)
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


class Process:
    """The process that renders templates of others; it ends with this one.

    seconds: of a processor, for a request.
    """

    def __init__(self, seconds: float = rendering.MOST_SECONDS) -> None:
        # BLAS would reserve memory for each thread.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", rendering.__file__, str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            UserError: if the process is gone.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = b""
        if not line:
            raise UserError(
                "the process that renders chat templates was ended from outside, most likely for want of "
                "memory; start again"
            )
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the process; once more has no effect."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):  # it is gone
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@cache
def _process() -> Process:
    return Process()
