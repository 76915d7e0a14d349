"""Chat templates: a conversation to text, and which parts of the text an assistant has said.

A template is Jinja. transformers renders it in its sandbox: it reads the messages, and reaches neither files
nor Python. What an assistant has said is what the template's `{% generation %}` blocks hold, or, in a
template without them, what it adds to the prompt of an answer.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megamoe.apps.chat.conversation import ASSISTANT, Conversation
from megamoe.apps.chat.named_templates import NAMED
from megamoe.data.tokenizers import Tokenizer
from megamoe.errors import UserError
from megamoe.io import read_plain, reason

LARGEST = 1 << 20  # bytes of a template
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
READ = ("import", "from", "include", "extends")  # tags that read other files
BEGINNINGS = ("<s>", "<|begin_of_text|>")
OF_TOKENIZER = "tokenizer"


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

    @cached_property
    def has_generation(self) -> bool:
        """Whether the template itself says what an assistant generates."""
        return GENERATION.search(self.text) is not None

    def render(self, conversation: Conversation) -> Rendered:
        """Return the text of a conversation, with a span for each message of an assistant.

        Raises:
            UserError: if the template is broken, runs code, refuses the conversation, or does not say which
                part of it is an answer.
        """
        messages = conversation.messages
        text, spans = self._rendered(messages, conversation.tools)
        if not self.has_generation:
            spans = self._added(conversation, text)
        answers = sum(message["role"] == ASSISTANT for message in messages)
        if len(spans) != answers:
            raise UserError(
                f"template {self.name}: {len(spans)} {{% generation %}} blocks for {answers} messages of an "
                "assistant; put one around each"
            )
        return Rendered(text, spans)

    def prompt(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
        """Return the text after which the model answers; raise UserError as `render`."""
        return self._rendered(messages, tools, generation_prompt=True)[0]

    def _added(self, conversation: Conversation, whole: str) -> list[tuple[int, int]]:
        """Return the spans of a template without `generation` blocks: what follows each answer's prompt."""
        spans = []
        for place, message in enumerate(conversation.messages):
            if message["role"] != ASSISTANT:
                continue
            prompt = self.prompt(conversation.messages[:place], conversation.tools)
            answered, _ = self._rendered(conversation.messages[: place + 1], conversation.tools)
            if not (answered.startswith(prompt) and whole.startswith(answered)):
                raise UserError(
                    f"template {self.name}: it writes the same messages differently when others follow, so "
                    "the answers cannot be found; put {% generation %} and {% endgeneration %} around them"
                )
            spans.append((len(prompt), len(answered.rstrip())))
        return spans

    def _rendered(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from jinja2 import TemplateError
        from jinja2.exceptions import SecurityError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.text,
                return_assistant_tokens_mask=self.has_generation,
                add_generation_prompt=generation_prompt,
                **self.named,
            )
        except SecurityError as error:
            raise _with_code(self.name, str(error)) from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            words = " ".join(str(error).split())
            raise UserError(f"template {self.name}: {words}; change the messages or the template") from None
        return texts[0], spans[0] if spans else []


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
    """Return the template; raise UserError if it reads files, or reaches for Python's internals.

    The sandbox refuses these too, but only where a conversation comes to that place.
    """
    from jinja2 import Environment, TemplateSyntaxError

    previous = ""
    try:
        for line, kind, value in Environment().lex(template.text):
            if kind == "whitespace":
                continue
            is_attribute = kind == "name" and previous == "." and value.startswith("_")
            is_attribute |= kind == "name" and previous == "|" and value == "attr"
            is_internal = kind in ("name", "string") and re.fullmatch(r"['\"]?__\w+__['\"]?", value)
            is_tag = kind == "name" and value in READ and previous.startswith("{%")
            if is_attribute or is_internal or is_tag:
                raise _with_code(template.name, f"line {line} has {value}")
            previous = value
    except TemplateSyntaxError as error:
        raise UserError(
            f"template {template.name}: line {error.lineno}: {error.message}; expected Jinja as transformers "
            "reads it"
        ) from None
    return template


def _with_code(name: str, why: str) -> UserError:
    words = " ".join(why.split())
    return UserError(
        f"template {name}: it has code that the sandbox refuses ({words}); a template may only read the "
        "messages and the tools"
    )
