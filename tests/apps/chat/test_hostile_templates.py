"""Chat templates that never end, grow, recurse, reach for Python or are no Jinja cost a line each."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megamoe.apps.chat import sandbox
from tests.support.data.conversations import conversation, write_lines

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
END = "{% endfor %}{% endfor %}"
GROW = "{% set n = namespace(t='ab') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}"
TIME, MEMORY = "takes more than 0.4 s", "takes more than 1024 MiB"
CODE, DEEP = "it has code that the sandbox refuses", "nested too deeply"
# By name: the template, and what its line says.
HOSTILE = {
    "loop": (LOOP + END, TIME),
    "power": ("{{ 7 ** (7 ** 9) }}", TIME),
    "digits": ("{{ 10 ** 99999 }}", "digits"),
    "range": ("{{ range(10 ** 9) | list }}", "Range too big"),
    "product": ("{{ 'x' * 10 ** 11 }}", MEMORY),
    "growth": (GROW + "{{ n.t }}", "it takes more than"),
    "text": ("{{ 'x' * (messages | length * 9999999) }}", "it writes 39,999,996 characters"),
    "format": ("{{ '{:>10000000000}'.format('a') }}", MEMORY),
    "date": ("{{ strftime_now('%999999999d') }}", "it writes no text for an answer"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", DEEP),
    "brackets": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", DEEP),
    "cycle": ("{% set n = namespace() %}{% set n.n = n %}{{ n | tojson }}", "not JSON serializable"),
    "class": ("{{ ''.__class__.__mro__ }}", CODE),
    "class by a name": ("{{ ''['__cla' ~ 'ss__'].x }}", "unsafe"),
    "attr": ("{{ '' | attr('x') }}", CODE),
    "change": ("{{ messages.clear() }}", CODE),
    "include": ("{% include '/etc/passwd' %}", CODE),
    "tag": ("{% what %}", "unknown tag"),
    "names twice": ("{% macro m(a, a) %}{% endmacro %}", "cannot be compiled"),
    "stop": ("{{ raise_exception('x\n' * 9999) }}", "template own.jinja: x x x"),
    "surrogate": ("{{ '\\ud800' }}", "surrogates not allowed"),
    "separators": ("{{ raise_exception('\u2028\u202e\x1b[2J') }}", "\\u202e\\x1b[2J"),
    "bytes": ("\xff\xfe", "cannot be read: "),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_a_line(
    name: str, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, no traceback, nothing written, and no line is tried after a template without bounds."""
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.4)
    text, words = HOSTILE[name]
    lines = write_lines(tmp_path / "chats.jsonl", [conversation(0)])
    (tmp_path / "own.jinja").write_bytes(text.encode("latin-1" if name == "bytes" else "utf-8"))
    before = time.monotonic()
    arguments = ["--tokenizer", "bytes", "--template", "own.jinja", "--output", "train"]
    error = refused("prepare_chat", lines.name, *arguments)
    assert "own.jinja" in error and words in error
    assert time.monotonic() - before < 30 and len(error) < 700
    assert {path.name for path in tmp_path.iterdir()} == {"chats.jsonl", "own.jinja"}
