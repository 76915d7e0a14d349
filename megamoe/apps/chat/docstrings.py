"""Questions and answers from the docstrings of Python sources: conversations without a download."""

import ast
import json
import warnings
from collections.abc import Iterator
from pathlib import PurePosixPath

from megamoe.apps.prepare.sources import NAME_MARK, Source

QUESTIONS = ("What does {} do?", "What is {} for?", "Explain {}.")
LONGEST = 400  # characters of an answer
LEAST = 20


def questions_of(source: Source, text: str) -> Iterator[tuple[str, str]]:
    """Yield (place, line) of a question about each public function and class of a source, and its answer.

    The answer is the first paragraph of the docstring; those that are very long or short are left out.
    """
    path = PurePosixPath(source.name.rpartition(NAME_MARK)[2]).with_suffix("")
    module = ".".join(part for part in path.parts if part != "__init__")
    try:
        with warnings.catch_warnings():  # of escapes in old sources
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node, name in _public(tree, module):
        answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        if LEAST <= len(answer) <= LONGEST:
            kind = "the class" if isinstance(node, ast.ClassDef) else "the function"
            question = QUESTIONS[len(answer) % len(QUESTIONS)].format(f"{kind} {name}")
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            yield f"{source.name}:{node.lineno}", json.dumps({"messages": messages})


def _public(
    parent: ast.Module | ast.ClassDef, prefix: str
) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Yield classes, functions and methods without an underscore at the beginning, with their full names."""
    for node in parent.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_"):
                continue
            yield node, f"{prefix}.{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from _public(node, f"{prefix}.{node.name}")
