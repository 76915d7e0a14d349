"""Secrets in names, arguments and texts: what consoles, files and trackers must not get.

`redact` is the one place: messages go through it (`UserError`, `RemoteError`, the last line and the
traceback of a process), and what is read back from the files of a run. Standard library alone.

python -m megamoe.redaction < lines    # examples/slurm/common.sh: as `redacted`, line by line
"""

import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from urllib.parse import quote

# As a word of a name: `WANDB_API_KEY`, `s3.secret`, `--auth-token`; not `data.tokenizer` or `monkey`.
NAMES = re.compile(
    r"(?i)(?<![a-z])(api-?key|key|keys|token|secret|secrets|passw(or)?d|passphrase|credentials?|jwt|auth)(?![a-z])"
)
HIDDEN = "***"
SHORTEST = 8  # characters of a known value: a shorter one is a word of ordinary text
IN_URL = re.compile(r"(?<=://)[^/\s'\"]+@")  # a user and password
# Of a signed URL; such names also stand in headers.
NAMED = (
    r"(?i)(?<![\w.-])([\w.-]*(?:sig|signature|token|secret|passw(?:or)?d|credential|accesskeyid|api[-_]?key)=)"
    r"[^&\s'\"<>]"
)
PARAMETER = re.compile(NAMED)
FORMS = (
    (IN_URL, f"{HIDDEN}@"),
    (re.compile(r"(://[^\s'\"<>?]*\?)[^\s'\"<>]*=[^\s'\"<>]*"), rf"\1{HIDDEN}"),  # a query
    (re.compile(NAMED + "{8,}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[a-z0-9+/=._~-]{12,}"), rf"\1 {HIDDEN}"),
    # In XML, JSON, YAML and headers: <SessionToken>..., "aws_secret_access_key": "...", AccountKey=...
    (
        re.compile(
            r"(?i)((?:secret|passw(?:or)?d|passphrase|signatureprovided|token-\d+|(?:access|account|api|private)[_.-]?key"
            r"|(?:session|security|access|auth|refresh|sas|id)[_.-]?token)[a-z0-9_.-]{0,20}[\"']?\s*[=:>]\s*[\"']?)"
            r"[^\s\"'<>&,;(){}\[\]]{4,}"
        ),
        rf"\1{HIDDEN}",
    ),
    # Well-known beginnings, whatever the name: keys of AWS, its session tokens, Google's, JSON Web Tokens.
    (
        re.compile(
            r"\b(hf_|gh[pos]_|github_pat_|glpat-|sk-|xox[bp]-|AKIA|ASIA|eyJ|ya29\.|AIza)[A-Za-z0-9_.\-]{12,}"
            r"|\b(IQoJ|FwoG|FQoG|AQoD)[A-Za-z0-9+/=_%\-]{20,}"
        ),
        HIDDEN,
    ),
)
# Files of AWS's tools, by the variables that name others.
AWS_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
AWS_LINE = re.compile(r"^[ \t]*(aws_\w+)[ \t]*[=:][ \t]*(\S+)", re.MULTILINE)
LARGEST_AWS_FILE = 1 << 20  # characters
_known: dict[str, None] = {}


def is_secret(name: str) -> bool:
    """Return whether a variable, key or option of that name may hold a secret."""
    return NAMES.search(name) is not None


def remember(options: dict[Any, Any]) -> None:
    """Hide from now on the values of what has a secret's name, in mappings of any depth.

    A file's path is no secret, though GOOGLE_APPLICATION_CREDENTIALS names one.
    """
    for name, value in options.items():
        if isinstance(value, dict):
            remember(value)
        elif not isinstance(value, str) or len(value) < SHORTEST or not is_secret(str(name)):
            continue
        elif not os.path.exists(value):
            _known[value] = _known[quote(value, safe="")] = None


def redact(text: str) -> str:
    """Return a text with `***` in place of secrets.

    These are the values of the environment's variables and of AWS's files, and those of `remember`; and what
    is a secret by its form: user and password in a URL, its query, named and well-known tokens.
    """
    remember(dict(os.environ))
    for variable, usual in AWS_FILES.items():
        with suppress(OSError, ValueError):  # it is not there, or cannot be read
            about = os.stat(path := os.path.expanduser(os.environ.get(variable) or usual))
            if stat.S_ISREG(about.st_mode):
                _remember_file(path, about.st_mtime_ns, about.st_size)
    for value in sorted(_known, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    for form, hidden in FORMS:
        text = form.sub(hidden, text)
    return text


@cache
def _remember_file(path: str, changed_ns: int, size: int) -> None:
    """Hide the keys in a file of AWS's tools; it is read again when it has changed."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for name, value in AWS_LINE.findall(file.read(LARGEST_AWS_FILE)):
            remember({name: value})


def redact_all(value: Any) -> Any:
    """Return plain data with `redact` of its texts; keys stay."""
    if isinstance(value, dict):
        return {key: redact_all(each) for key, each in value.items()}
    if isinstance(value, list):
        return [redact_all(each) for each in value]
    return redact(value) if isinstance(value, str) else value


def line_of(error: BaseException) -> str:
    """Return what an error says, in one line without secrets; its class, if it says nothing."""
    return redact(" ".join(str(error).split())) or type(error).__name__


def redacted(arguments: Iterable[str]) -> list[str]:
    """Return the arguments of a command with `***` in place of secrets.

    These are the value of `name=value` or `--name value` where the name says so, and what `redact` finds.
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
            found.append(redact(argument))
        hides_next = argument.startswith("-") and not equals and is_secret(argument)
    return found


@contextmanager
def without_secrets(kept: tuple[str, ...] = ()) -> Iterator[None]:
    """Hide secrets of this process' environment and arguments from what is started meanwhile.

    kept: beginnings of the names of variables that it needs nevertheless.
    """
    names = [name for name in os.environ if is_secret(name) and not name.startswith(kept or ("\0",))]
    remember(dict(os.environ))
    variables, arguments = {name: os.environ.pop(name) for name in names}, list(sys.argv)
    sys.argv[:] = redacted(arguments)
    try:
        yield
    finally:
        os.environ.update(variables)
        sys.argv[:] = arguments


if __name__ == "__main__":
    for row in sys.stdin:
        print(*redacted(row.rstrip("\n").split(" ")))
