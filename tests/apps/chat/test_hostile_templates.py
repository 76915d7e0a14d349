"""Chat templates that never end, grow, recurse, reach for Python or are no Jinja cost a line each."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megamoe.apps.chat import sandbox
from tests.support.data.conversations import conversation, write_lines

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
END = "{% endfor %}{% endfor %}"
GROW = "{% set n = namespace(t='ab') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}"
TIME, MEMORY, CODE = (
    "takes more than 0.4 s",
    "takes more than 1024 MiB",
    "it has code that the sandbox refuses",
)
LIMIT, CODE = "it takes more than", "it has code that the sandbox refuses"
DEEP, EMPTY = "nested too deeply", "it writes no text for an answer"
# By name: the template, and what its line says.
HOSTILE = {
    "loop": (LOOP + END, TIME),
    "loop that writes": (LOOP + "x" * 99 + END, ""),
    "loop of strings": (LOOP + "{% set x = a ~ b %}" + END, TIME),
    "macro that loops": ("{% macro m() %}" + LOOP + END + "{% endmacro %}{{ m() }}", TIME),
    "condition that loops": ("{% if (range(99999) | list * 999) | sum %}{% endif %}", ""),
    "power": ("{{ 7 ** (7 ** 9) }}", TIME),
    "powers": ("{{ (2 ** 99999999) ** 99 }}", ""),
    "digits": ("{{ 10 ** 99999 }}", "digits"),
    "range": ("{{ range(10 ** 9) | list }}", "Range too big"),
    "product": ("{{ 'x' * 10 ** 11 }}", MEMORY),
    "product of lists": ("{{ [0] * 10 ** 10 }}", MEMORY),
    "growth": (GROW + "{{ n.t }}", LIMIT),
    "growth by replace": (GROW.replace("n.t ~ n.t", "n.t.replace('a', n.t)"), LIMIT),
    "growth by join": ("{{ ('x' * 10 ** 8).join(range(99) | map('string') | list) }}", LIMIT),
    "growth by tojson": ("{{ ('x' * 10 ** 8 * 2) | list | tojson }}", LIMIT),
    "text": ("{{ 'x' * (messages | length * 9999999) }}", "it writes 39,999,996 characters"),
    "percent": ("{{ '%1000000000d' % 1 }}", ""),
    "percent by a filter": ("{{ '%1000000000s' | format('a') }}", ""),
    "format": ("{{ '{:>10000000000}'.format('a') }}", MEMORY),
    "center": ("{{ 'a' | center(10 ** 10) }}", MEMORY),
    "ljust": ("{{ 'a'.ljust(10 ** 11) }}", MEMORY),
    "zfill": ("{{ 'a'.zfill(10 ** 12) }}", MEMORY),
    "indent": ("{{ ('a\n' * 10 ** 6) | indent(10 ** 6) }}", LIMIT),
    "lipsum": ("{{ lipsum(n=10 ** 7) }}", ""),
    "batch": ("{{ [1] | batch(10 ** 10, 0) | list }}", LIMIT),
    "tabs": ("{{ ('\\t' * 10 ** 6).expandtabs(10 ** 6) }}", LIMIT),
    "date": ("{{ strftime_now('%999999999d') }}", EMPTY),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", DEEP),
    "two that recurse": (
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        DEEP,
    ),
    "loop that recurses": ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", DEEP),
    "brackets": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", DEEP),
    "lists": ("{{ " + "[" * 9999 + "]" * 9999 + " }}", DEEP),
    "blocks": ("{% if 1 %}" * 500 + "{% endif %}" * 500, ""),
    "cycle": ("{% set n = namespace() %}{% set n.n = n %}{{ n | tojson }}", "not JSON serializable"),
    "class": ("{{ ''.__class__.__mro__ }}", CODE),
    "class by a name": ("{{ ''['__cla' ~ 'ss__'].x }}", "unsafe"),
    "globals": ("{{ cycler.__init__.__globals__ }}", CODE),
    "attr": ("{{ '' | attr('x') }}", CODE),
    "map of attributes": ("{{ [''] | map(attribute='__cl' ~ 'ass__') }}", ""),
    "format of attributes": ("{{ '{0.__class__}'.format('') }}", EMPTY),
    "change": ("{{ messages.clear() }}", CODE),
    "namespace": ("{% set n = namespace(_x=1) %}", CODE),
    "include": ("{% include '/etc/passwd' %}", CODE),
    "import": ("{% import 'os' as os %}{{ os }}", CODE),
    "extends": ("{% extends 'a' %}", CODE),
    "tag": ("{% what %}", "unknown tag"),
    "no end": ("{% for m in messages %}", "line 1: Unexpected end of template"),
    "filter": ("{{ messages | nothing }}", "No filter named"),
    "string": ("{{ 'a }}", "expected Jinja"),
    "names twice": ("{% macro m(a, a) %}{% endmacro %}", "cannot be compiled"),
    "undefined": ("{{ nothing.at.all }}", "'nothing' is undefined"),
    "keys": ("{{ messages[0][[]] }}", EMPTY),
    "stop": ("{{ raise_exception('x\n' * 9999) }}", "template own.jinja: x x x"),
    "surrogate": ("{{ '\\ud800' }}", "surrogates not allowed"),
    "separators": ("{{ raise_exception('\u2028\u202e\x1b[2J') }}", "\\u202e\\x1b[2J"),
    "zero": ("{{ 1 // 0 }}", "by zero"),
    "break": ("{% break %}", "outside"),
    "break in a macro": (
        "{% for i in [1] %}{% macro m() %}{% break %}{% endmacro %}{{ m() }}{% endfor %}",
        "outside",
    ),
    "bytes": ("\xff\xfe", "cannot be read: "),
}


@pytest.fixture(name="process", scope="module")
def _process() -> Iterator[sandbox.Process]:
    process = sandbox.Process(seconds=0.4)
    yield process
    assert process._process.stdin is not None
    process._process.stdin.close()
    _, _, usage = os.wait4(process._process.pid, 0)  # of its workers too
    assert usage.ru_maxrss < 3 << 19  # KiB: 1.5 GiB
    process.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_a_line(
    name: str,
    process: sandbox.Process,
    tmp_path: Path,
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exit code 2, no traceback, nothing written, and no line is tried after a template without bounds."""
    monkeypatch.setattr(sandbox, "_process", lambda: process)
    text, words = HOSTILE[name]
    lines = write_lines(tmp_path / "chats.jsonl", [conversation(0)])
    (tmp_path / "own.jinja").write_bytes(text.encode("latin-1" if name == "bytes" else "utf-8"))
    before = time.monotonic()
    arguments = ["--tokenizer", "bytes", "--template", "own.jinja", "--output", "train"]
    error = refused("prepare_chat", lines.name, *arguments)
    assert "own.jinja" in error and words in error
    assert time.monotonic() - before < 30 and len(error) < 700
    assert {path.name for path in tmp_path.iterdir()} == {"chats.jsonl", "own.jinja"}
