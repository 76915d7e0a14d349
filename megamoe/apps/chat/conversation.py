"""Conversations: the lines of a file, checked."""

from dataclasses import dataclass, field
from typing import Any

from megamoe.errors import UserError

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


@dataclass(frozen=True)
class Conversation:
    """Messages in the order of the conversation, and the tools that the assistant may call.

    learned: of each message of an assistant, whether the model learns to write it (`weight` of the message).
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    learned: list[bool] = field(default_factory=list)


def conversation_of(record: object) -> Conversation:
    """Return the conversation of a line's object.

    A message has a `role` and a `content`; an assistant's may have `tool_calls` in place of a content,
    and a `weight` of 0 if it is not to be learned. A user follows the system or an assistant, an assistant a
    user or a tool, a tool an assistant that called it; an assistant is the last.

    Raises:
        UserError: for a record of another form; the text begins with what is wrong, without the line.
    """
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(messages, list) or not messages:
        found = f"keys {', '.join(map(str, record))}" if isinstance(record, dict) else type(record).__name__
        raise UserError(f"no messages (found {found}); expected {EXPECTED}")
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
    if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise UserError("tools: expected a list of objects, the functions' schemas")
    return Conversation(messages, tools or None, learned)


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
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (
        role == ASSISTANT and isinstance(calls, list) and all(isinstance(call, dict) for call in calls)
    ):
        raise UserError(f"message {number}: tool_calls: expected a list of objects, of an assistant")
    if content is None and calls:
        return
    if not isinstance(content, str):
        raise UserError(
            f"message {number} has no text: content is {type(content).__name__}, expected a string"
        )
    if role == ASSISTANT and not content.strip() and not calls:
        raise UserError(f"message {number} is an assistant's without text; remove it or answer")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"message {number}: half a surrogate pair in content: {error.reason}") from None


def _weight(message: dict[str, Any], number: int) -> int:
    weight = message.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise UserError(f"message {number}: weight {weight!r}, expected 0 (not learned) or 1")
    return int(weight)
