"""Conversations with a trained model: its chat template, and where an answer ends."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megamoe.apps.chat.conversation import ASSISTANT, SYSTEM, USER
from megamoe.apps.chat.prepare import ChatFiles, check_texts, load_chat_card
from megamoe.apps.chat.templates import ChatTemplate, end_of_turn, load_template
from megamoe.apps.command import CONTROLS
from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.generate import checked_prompts, generate, tokenizer_of
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


def converse(chat: Chat, sampling: Sampling) -> None:
    """Answer the lines of the standard input, each given those before; what is refused is forgotten.

    Raises:
        UserError: on several ranks, of which one alone has the standard input.
    """
    if chat.trained.world.size > 1:
        raise UserError("--chat: lines can be asked for on one rank only; give --prompt TEXT or --file FILE")
    if sys.stdin.isatty():
        print("a line is a question; Ctrl-D ends")
    messages: Messages | None = None
    for line in iter(sys.stdin.readline, ""):
        if not line.strip():
            continue
        asked = chat.ask(line.strip(), messages)
        try:
            (found,) = generate(chat.trained, [chat.prompt(asked, sampling.max_tokens)], sampling)
            text = found.text.strip()
            messages = [*asked, {"role": ASSISTANT, "content": text}]
        except UserError as error:
            text = f"error: {error}"
        print(f"> {text.translate(CONTROLS)}", flush=True)
