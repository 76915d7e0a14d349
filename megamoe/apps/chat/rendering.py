"""Renders chat templates by transformers' sandbox. As a script, it is the process of `sandbox.py`.

The sandbox keeps a template from files and from Python, but bounds neither time nor memory. The script does:
it answers requests, a line of JSON each, and dies of one that takes too much. It imports nothing of megamoe,
so that it starts soon and needs little memory.
"""

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 30  # beyond what the imports need
MOST_ADDED, MOST_TIMES = 1 << 20, 16  # characters of a text: so many, and so many for each of the request
READ = ("import", "from", "include", "extends")  # tags that read other files
BLOCKS, ADDED = "blocks", "added"  # how `render` knows the answers
# What is wrong: code that the sandbox refuses, the template itself, or the template with these messages.
CODE, TEMPLATE, MESSAGES = "code", "template", "messages"


class CodeError(Exception):
    """A template reads files, or reaches for Python's internals."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return {"text", "spans"} of a request, the arguments of `render`, or {"problem", "words"}.

    A request with a `template` alone checks it: {}.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.exceptions import SecurityError

    try:
        if request.keys() == {"template"}:
            check(**request)
            return {}
        text, spans = render(**request)
        text.encode("utf-8")  # a template may write half a surrogate pair
        return {"text": text, "spans": spans}
    except (CodeError, SecurityError) as error:
        return {"problem": CODE, "words": str(error)}
    except TemplateSyntaxError as error:
        words = f"line {error.lineno}: {error.message}; expected Jinja as transformers reads it"
        return {"problem": TEMPLATE, "words": words}
    except MemoryError:
        return {"problem": TEMPLATE, "words": f"it takes more than {MOST_BYTES >> 20} MiB"}
    except RecursionError:
        return {"problem": MESSAGES, "words": "it, or a message, is nested too deeply"}
    except Exception as error:  # a template may raise anything
        return {"problem": MESSAGES, "words": str(error) or type(error).__name__}


def render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    named: dict[str, str],
    spans: str | None,
) -> tuple[str, list[tuple[int, int]] | None]:
    """Return the text, and the [start, end) of the characters of each answer.

    spans: BLOCKS: answers are what `generation` blocks hold. ADDED: what an answer adds to its prompt; they
    are None if the same messages are written differently when others follow. None: the text ends with the
    prompt of an answer, and there are no spans.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    def rendered(count: int, **options: bool) -> tuple[str, list[tuple[int, int]]]:
        texts, found = render_jinja_template(
            conversations=[messages[:count]], tools=tools, chat_template=template, **options, **named
        )
        return texts[0], found[0] if found else []

    whole, found = rendered(
        len(messages), add_generation_prompt=spans is None, return_assistant_tokens_mask=spans == BLOCKS
    )
    if spans == ADDED:
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt, _ = rendered(place, add_generation_prompt=True)
                answered, _ = rendered(place + 1)
                if not (answered.startswith(prompt) and whole.startswith(answered)):
                    return whole, None
                found.append((len(prompt), len(answered.rstrip())))
    return whole, found


def check(template: str) -> None:
    """Compile a template; raise CodeError for code, which the sandbox refuses only where a conversation comes
    to it, and what the compiler raises.
    """
    from jinja2 import Environment
    from transformers.utils.chat_template_utils import render_jinja_template

    previous = ""
    for line, kind, value in Environment().lex(template):
        if kind == "whitespace":
            continue
        is_attribute = kind == "name" and previous == "." and value.startswith("_")
        is_attribute |= kind == "name" and previous == "|" and value == "attr"
        is_internal = kind in ("name", "string") and re.fullmatch(r"['\"]?__\w+__['\"]?", value)
        is_tag = kind == "name" and value in READ and previous.startswith("{%")
        if is_attribute or is_internal or is_tag:
            raise CodeError(f"line {line} has {value}")
        previous = value
    try:
        render_jinja_template(conversations=[], chat_template=template)  # compiles it, and renders nothing
    except SyntaxError as error:  # of the Python that Jinja makes
        raise ValueError(f"it cannot be compiled: {error.msg}") from None


def main(seconds: float) -> None:
    """Answer requests until there are no more; seconds: of a processor, for each."""
    import resource

    from transformers.utils import chat_template_utils  # noqa: F401  # before the bound on memory

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the caller, and so this process
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, also in C code
        reply = answer(json.loads(line))
        if (size := len(reply.get("text", ""))) > MOST_ADDED + MOST_TIMES * len(line):
            reply = {"problem": TEMPLATE, "words": f"it writes {size:,} characters of {len(line):,}"}
        content = json.dumps(reply).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(content + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
