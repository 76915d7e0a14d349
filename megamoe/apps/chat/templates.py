"""Chat templates: a conversation to text, and which parts of the text an assistant has said.

A template is Jinja, which `rendering.py` renders: it reads the messages, and reaches neither files nor
Python. What an assistant has said is what the template's `{% generation %}` blocks hold, or, in a
template without them, what it adds to the prompt of an answer.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megamoe.apps.chat.conversation import ASSISTANT, USER, Conversation, name_of
from megamoe.apps.chat.named_templates import NAMED
from megamoe.apps.chat.rendering import ADDED, BLOCKS
from megamoe.apps.chat.sandbox import ask
from megamoe.data.tokenizers import Tokenizer
from megamoe.errors import UserError, printable
from megamoe.io import read_plain, reason

LARGEST = 1 << 20  # bytes of a template
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
BEGINNINGS = ("<s>", "<|begin_of_text|>")
OF_TOKENIZER = "tokenizer"
PROBE = "answer"


class LostCallError(UserError):
    """A template writes a message without its calls."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text. spans: the [start, end) of the characters of each assistant's turn."""

    text: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class ChatTemplate:
    """A template. name: in messages. named: the texts of special tokens for it, such as `eos_token`."""

    name: str
    text: str
    named: dict[str, str]

    def render(self, conversation: Conversation) -> Rendered:
        """Return the text of a conversation, with a span for each message of an assistant.

        Raises:
            UserError: if the template is broken, runs code, refuses the conversation, leaves out calls or
                tools, or does not say which part of it is an answer.
        """
        if all(message.get("content") is not None for message in conversation.messages):
            return self._checked(conversation)
        # A null is no text: most templates would write `None`. Some write calls beside a null alone.
        empty = [
            message if message.get("content") is not None else {**message, "content": ""}
            for message in conversation.messages
        ]
        try:
            return self._checked(replace(conversation, messages=empty))
        except LostCallError:
            return self._checked(conversation)

    def _checked(self, conversation: Conversation) -> Rendered:
        answers_are = BLOCKS if GENERATION.search(self.text) else ADDED
        text, spans = self._rendered(conversation.messages, conversation.tools, answers_are)
        if spans is None:
            raise UserError(
                f"template {self.name}: it writes the same messages differently when others follow, so the "
                "answers cannot be found; put {% generation %} and {% endgeneration %} around them"
            )
        answers = sum(message["role"] == ASSISTANT for message in conversation.messages)
        if len(spans) != answers:
            raise UserError(
                f"template {self.name}: {len(spans)} {{% generation %}} blocks for {answers} messages of an "
                "assistant; put one around each"
            )
        _check_written(self.name, conversation, text, spans)
        return Rendered(text, spans)

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """Return the text after which the model answers; raise UserError as `render`."""
        return self._rendered(messages, tools, None)[0]

    def _rendered(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, spans: str | None
    ) -> tuple[str, list[tuple[int, int]] | None]:
        request = {"messages": messages, "tools": tools, "named": self.named, "spans": spans}
        reply = ask(self.name, {"template": self.text, **request})
        return reply["text"], reply["spans"]


def _check_written(name: str, conversation: Conversation, text: str, spans: list[tuple[int, int]]) -> None:
    """Check that each answer has a text and the names of its calls, and the rest the names of the tools.

    Raises:
        UserError: if one is missing; LostCallError: of a call.
    """
    answers = [message for message in conversation.messages if message["role"] == ASSISTANT]
    for message, (start, end) in zip(answers, spans, strict=True):
        answer = text[start:end]
        if not answer.strip() and not message.get("tool_calls"):
            raise UserError(f"template {name}: it writes no text for an answer; name another template")
        written = answer.replace((message.get("content") or "").strip() or "\0", "", 1)
        calls = Counter(name_of(call) or "" for call in message.get("tool_calls") or [])
        lost = next((call for call, count in calls.items() if written.count(call) < count), None)
        if lost is not None:
            raise LostCallError(
                f"template {name}: it does not write the call of {printable(lost, 60)} in tool_calls; name a "
                "template that does, or leave the conversation out"
            )
    if conversation.tools:
        rest = "".join(
            text[end:start] for (_, end), (start, _) in pairwise([(0, 0), *spans, (len(text),) * 2])
        )
        for message in conversation.messages:
            if message["role"] != ASSISTANT:
                rest = rest.replace((message.get("content") or "").strip() or "\0", "", 1)
        lost = next((tool for each in conversation.tools if (tool := name_of(each) or "") not in rest), None)
        if lost is not None:
            raise UserError(
                f"template {name}: it does not write the tool {printable(lost, 60)} of tools; name a "
                "template that does, or remove tools"
            )


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the token, or else the text, with which the template ends an answer; nothing if it does not."""
    asked = [{"role": USER, "content": PROBE}, {"role": ASSISTANT, "content": PROBE}]
    rendered = template.render(Conversation(asked))
    start, end = rendered.spans[-1]
    ending = rendered.text[start:end].partition(PROBE)[2].strip()
    if not ending:
        return (), ()
    tokens, _ = tokenizer.encode_marked(ending)
    is_mark = len(tokens) == 1 and tokens[0] in tokenizer.marks.values()
    return ((tokens[0],), ()) if is_mark else ((), (ending,))


def load_template(reference: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Return a template by its name, from a file, or (None) that of the tokenizer.

    Raises:
        UserError: if there is none, it cannot be read, or it holds code.
    """
    beginning = next((text for text in BEGINNINGS if text in tokenizer.marks), None)
    named = {"eos_token": tokenizer.eod_text, **({} if beginning is None else {"bos_token": beginning})}
    named |= tokenizer.named
    if reference is None:
        if tokenizer.chat_template is None:
            raise UserError(
                f"tokenizer {tokenizer.name!r} has no chat template; name one with --template: "
                f"{', '.join(NAMED)}, or a file of Jinja"
            )
        return checked(ChatTemplate(OF_TOKENIZER, tokenizer.chat_template, named))
    if reference in NAMED:
        return ChatTemplate(reference, NAMED[reference], named)
    path = Path(reference)
    if not path.is_file():
        raise UserError(
            f"--template: {reference!r} is neither a file nor one of {', '.join(NAMED)}; name one of them"
        )
    try:
        text = read_plain(path, LARGEST).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"--template: {reference!r} cannot be read: {reason(error)}; expected Jinja"
        ) from None
    return checked(ChatTemplate(reference, text, named))


def checked(template: ChatTemplate) -> ChatTemplate:
    """Return the template; raise UserError if it is no Jinja, reads files, or reaches for Python's internals.

    The sandbox refuses these too, but only where a conversation comes to that place.
    """
    ask(template.name, {"template": template.text})
    return template
