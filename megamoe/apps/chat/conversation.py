"""Conversations: the lines of a file, checked."""

import json
from dataclasses import dataclass, field
from typing import Any

from megamoe.errors import UserError, printable

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
# The roles that may stand after each; None: at the beginning.
FOLLOWING: dict[str | None, tuple[str, ...]] = {
    None: (SYSTEM, USER),
    SYSTEM: (USER,),
    USER: (ASSISTANT,),
    ASSISTANT: (USER, TOOL),
    TOOL: (TOOL, ASSISTANT),
}
EXPECTED = '{"messages": [{"role": ..., "content": ...}, ...]}'
FUNCTION = '{"type": "function", "function": {"name": ..., ...}}'
OLD_FORM = {"functions": "tools", "function_call": "tool_calls"}  # OpenAI's, which templates do not read


@dataclass(frozen=True)
class Conversation:
    """Messages in the order of the conversation, and the tools that the assistant may call.

    messages: as in the file, but the arguments of calls are objects, not JSON strings. learned: of each
    message of an assistant, whether the model learns to write it (`weight` of the message).
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    learned: list[bool] = field(default_factory=list)


def conversation_of(record: object) -> Conversation:
    """Return the conversation of a line's object.

    A message has a `role` and a `content`; an assistant's may have `tool_calls` in place of a content (the
    `arguments` of a call are an object, or its JSON), and a `weight` of 0 if it is not to be learned. A user
    follows the system or an assistant, an assistant a user or a tool, a tool an assistant that called it; an
    assistant is the last.

    Raises:
        UserError: for a record of another form; the text begins with what is wrong, without the line.
    """
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(messages, list) or not messages:
        found = f"keys {', '.join(map(str, record))}" if isinstance(record, dict) else type(record).__name__
        raise UserError(f"no messages (found {found}); expected {EXPECTED}")
    _refuse_old_form(record, "")
    previous: str | None = None
    learned = []
    for number, message in enumerate(messages, start=1):
        role = _checked_role(message, previous, number)
        _check_content(message, role, number)
        if role == TOOL and previous == ASSISTANT and not messages[number - 2].get("tool_calls"):
            raise UserError(f"message {number} is a tool's, but message {number - 1} has no tool_calls")
        if role == ASSISTANT:
            learned.append(_weight(message, number) > 0)
        previous = role
    if previous != ASSISTANT:
        raise UserError(
            f"the last message is of role {previous!r}, expected {ASSISTANT!r}: remove it or answer it"
        )
    tools = record.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(name_of(tool) for tool in tools)):
        raise UserError(f"tools: expected a list of functions, each as {FUNCTION}")
    read = [_with_read_calls(message, number) for number, message in enumerate(messages, start=1)]
    return Conversation(read, tools or None, learned)


def name_of(function: object) -> str | None:
    """Return the name of the function that a call or a tool is of; None: it has none."""
    inner = function.get("function", function) if isinstance(function, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    return name if isinstance(name, str) else None


def _refuse_old_form(keys: dict[str, Any], where: str) -> None:
    for old, new in OLD_FORM.items():
        if keys.get(old):
            raise UserError(f"{where}{old} is OpenAI's old form; write {new}")


def _with_read_calls(message: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a message whose calls have objects as arguments; they may be in JSON, as OpenAI has them."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise UserError(
                f"message {number}: the arguments of the call of {printable(name_of(call), 60)} are no JSON "
                f"object: {printable(function['arguments'], 60)!r}; correct them"
            )
        read = {**function, "arguments": arguments} if "arguments" in function else function
        calls.append({**call, "function": read} if "function" in call else read)
    return {**message, "tool_calls": calls}


def _checked_role(message: object, previous: str | None, number: int) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in (SYSTEM, USER, ASSISTANT, TOOL):
        raise UserError(
            f"message {number} has the role {str(role)[:40]!r}; expected {SYSTEM}, {USER}, {ASSISTANT} or "
            f"{TOOL}"
        )
    if role not in FOLLOWING[previous]:
        where = "at the beginning" if previous is None else f"after {previous!r}"
        raise UserError(
            f"message {number} is of role {role!r} {where}, where {' or '.join(FOLLOWING[previous])} is "
            "expected; put the messages in order"
        )
    return role


def _check_content(message: dict[str, Any], role: str, number: int) -> None:
    _refuse_old_form(message, f"message {number}: ")
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (
        role == ASSISTANT and isinstance(calls, list) and all(name_of(call) for call in calls)
    ):
        raise UserError(
            f"message {number}: tool_calls: expected a list of calls of an assistant, each as {FUNCTION}"
        )
    if content is None and calls:
        return
    if not isinstance(content, str):
        raise UserError(
            f"message {number} has no text: content is {type(content).__name__}, expected a string"
        )
    if role == ASSISTANT and not content.strip() and not calls:
        raise UserError(f"message {number} is an assistant's without text; remove it or answer")


def _weight(message: dict[str, Any], number: int) -> int:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise UserError(f"message {number}: weight {weight!r}, expected 0 (not learned) or 1")
    return int(weight)
