"""A YAML reader for configurations: YAML 1.2 numbers, no tags, and a bound on the expanded size.

PyYAML follows YAML 1.1, in which 1:30 is 90, 010 is 8 and 2024-01-01 is a date. Here these are text, which
the schema refuses if it expects a number. 1_000 stays a number. Source:
https://yaml.org/spec/1.2.2/#103-core-schema
"""

import re
from typing import Any

import yaml

DEEPEST = 50  # levels of mappings and lists
MOST_VALUES = 30_000  # with every alias written out
TEXT_OF_A_VALUE = 100  # characters
LONGEST_SHOWN = 60  # characters of a message
TEXT = "tag:yaml.org,2002:str"
REPLACED = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}
NO_KEYS = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "null")}  # keys are text: `no: file`
INT = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)\Z")
FLOAT = re.compile(
    r"""[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?\Z
    |[-+]?[0-9]+[eE][-+]?[0-9]+\Z
    |[-+]?\.(?:inf|Inf|INF)\Z
    |\.(?:nan|NaN|NAN)\Z""",
    re.VERBOSE,
)


class _Loader(yaml.SafeLoader):
    """Refuses tags, anchors that contain themselves, and keys that are not text or occur twice."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = self._values = 0
        self._open: set[str] = set()  # anchors of the nodes being read
        self._size: dict[str, int] = {}  # the number of values of each anchor

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        mark, anchor = event.start_mark, event.anchor
        before = self._values
        if isinstance(event, yaml.AliasEvent):
            if anchor in self._open:
                raise _error(f"the anchor &{_short(anchor)} contains itself", mark)
            self._count(self._size.get(anchor, 1), mark)
            return super().compose_node(parent, index)
        is_text = event.tag == TEXT and isinstance(event, yaml.ScalarEvent)
        if event.tag not in (None, "!") and not is_text:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            raise _error(f"the tag {_short(tag)} is not read; write the value without it", mark)
        # A long text counts as many values, because an alias repeats it.
        self._count(1 + len(getattr(event, "value", "")) // TEXT_OF_A_VALUE, mark)
        self._depth += 1
        if self._depth > DEEPEST:
            raise _error(f"nested more than {DEEPEST} levels deep", mark)
        if anchor is not None:
            self._open.add(anchor)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None:
            self._open.discard(anchor)
            self._size[anchor] = self._values - before
        return node

    def _count(self, values: int, mark: Any) -> None:
        self._values += values
        if self._values > MOST_VALUES:
            raise _error(f"more than {MOST_VALUES:,} values, with its aliases written out", mark)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError):  # a number of thousands of digits
            raise _error(f"{_short(node.value)} is no value", node.start_mark) from None
        if isinstance(value, str) and not value.isascii() and re.search("[\ud800-\udfff]", value):
            raise _error(f"{_short(value)!r} is no Unicode text", node.start_mark)
        return value

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                raise _error("expected text as a key", key_node.start_mark)
            if key_node.tag in NO_KEYS:  # the language no, the state on
                key_node.tag = TEXT
            if key in seen:
                raise _error(f"the key {_short(key)!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read as a number."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:int", INT, list("-+0123456789"))
    _class.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


def parse_yaml(text: str) -> Any:
    """Return mappings with text keys, lists, text, numbers, true, false and None; an alias is a copy.

    Raises:
        yaml.YAMLError: for anything else; `problem_of` describes it.
    """
    return _unshared(yaml.load(text, Loader=_Loader))


def _unshared(value: Any, depth: int = 1) -> Any:
    """Return a copy in which each alias is a value of its own, which an override changes alone."""
    if depth > DEEPEST:
        raise yaml.MarkedYAMLError(
            problem=f"nested more than {DEEPEST} levels deep, with its aliases written out"
        )
    if isinstance(value, dict):
        return {key: _unshared(each, depth + 1) for key, each in value.items()}
    return [_unshared(each, depth + 1) for each in value] if isinstance(value, list) else value


def problem_of(error: yaml.YAMLError) -> tuple[str, str]:
    """Return (` line 3`, or nothing if the line is not known; what is wrong)."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.reader.ReaderError):
        character = error.character if isinstance(error.character, int) else ord(error.character)
        return "", f"the character U+{character:04X} at place {error.position} is not allowed"
    problem = getattr(error, "problem", None) or "cannot be read"
    return f" line {mark.line + 1}" if mark is not None else "", problem


def dump(tree: Any) -> str:
    """Return plain data as YAML, with its keys in their order."""
    return str(yaml.dump(tree, Dumper=_Dumper, sort_keys=False))


def _error(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _short(text: object) -> str:
    shown = str(text)
    return shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."
