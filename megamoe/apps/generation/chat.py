"""Conversations with a trained model: its chat template, and where an answer ends."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megamoe.apps.chat.conversation import ASSISTANT, SYSTEM, USER
from megamoe.apps.chat.prepare import ChatFiles, check_texts, load_chat_card
from megamoe.apps.chat.templates import ChatTemplate, end_of_turn, load_template
from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.generate import Generated, checked_prompts, tokenizer_of
from megamoe.apps.generation.sampling import Sampling
from megamoe.errors import UserError

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Chat:
    """How a model is asked. system: the system's message, if any."""

    trained: TrainedModel
    template: ChatTemplate
    system: str | None = None

    def ask(self, text: str, before: Messages | None = None) -> Messages:
        """Return a conversation that ends with a user's question; before: what was said until now."""
        system = [] if self.system is None else [{"role": SYSTEM, "content": self.system}]
        return [*(system if before is None else before), {"role": USER, "content": text}]

    def prompt(self, messages: Messages, max_tokens: int) -> list[int]:
        """Return the tokens after which the model answers.

        Raises:
            UserError: if a message spells a special token, or the template or the model refuses it.
        """
        tokenizer = tokenizer_of(self.trained)
        check_texts(messages, tokenizer)
        tokens, _ = tokenizer.encode_marked(self.template.prompt(messages))
        return checked_prompts(self.trained, [tokens], max_tokens)[0]

    def ending(self, sampling: Sampling) -> Sampling:
        """Return the options with the end of an answer as a further end."""
        tokens, texts = end_of_turn(self.template, tokenizer_of(self.trained))
        return replace(sampling, stop_tokens=tokens, stop=(*sampling.stop, *texts))


def chat_of(trained: TrainedModel, reference: str | None, system: str | None) -> Chat:
    """Return how a model is asked: by the template that is named, the one of its conversations, or its
    tokenizer's.

    Raises:
        UserError: if there is none, or it cannot be read.
    """
    sources = trained.config.data.sources
    if reference is None and sources and ChatFiles(Path(sources[0].path)).card.is_file():
        return Chat(trained, load_chat_card(sources[0].path).chat_template(), system)
    return Chat(trained, load_template(reference, tokenizer_of(trained)), system)


def converse(
    chat: Chat, answer: Callable[[list[int]], Generated], max_tokens: int, lines: Iterator[str]
) -> Iterator[str]:
    """Yield the answer to each line that is not blank, given those before; what is refused is forgotten."""
    messages: Messages | None = None
    for line in lines:
        if not line.strip():
            continue
        asked = chat.ask(line.strip(), messages)
        try:
            text = answer(chat.prompt(asked, max_tokens)).text.strip()
        except UserError as error:
            yield f"error: {error}"
            continue
        messages = [*asked, {"role": ASSISTANT, "content": text}]
        yield text
