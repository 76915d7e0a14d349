"""Write questions and answers from the docstrings of Python's standard library, as JSON lines.

python examples/data/docstrings.py > data/chat_small/docstrings.jsonl
"""

import ast
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

QUESTIONS = ("What does {} do?", "What is {} for?", "Explain {}.")
LONGEST, LEAST = 400, 20  # characters of an answer
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def questions_of(text: str, path: Path) -> Iterator[dict[str, object]]:
    """Yield a conversation about each public function and class of a source: a question, and its answer.

    The answer is the first paragraph of the docstring; those that are very long or short are left out.
    path: of the source, inside of the library.
    """
    module = ".".join(part for part in path.with_suffix("").parts if part != "__init__")
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
            yield {
                "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            }


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


if __name__ == "__main__":
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(path.relative_to(root) for path in root.rglob("*.py")):
        if NOT_LIBRARY.isdisjoint(path.parts):
            for conversation in questions_of((root / path).read_text(encoding="utf-8"), path):
                print(json.dumps(conversation))
