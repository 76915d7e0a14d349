"""What a folder has of a model that was tuned on conversations: its chat template, and the ends of a turn."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from megamoe.apps.chat.prepare import load_chat_card
from megamoe.apps.chat.templates import ChatTemplate, end_of_turn
from megamoe.apps.hf.folder import (
    CHAT_TEMPLATE,
    OLD_CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
    first_source,
    tokenizer_reference,
)
from megamoe.apps.hf.keys import Json
from megamoe.checkpoint.format.files import parse_json
from megamoe.config import RunConfig
from megamoe.data.tokenizers import load_tokenizer
from megamoe.errors import UserError


@dataclass(frozen=True)
class Chat:
    """The template that a run was tuned with, and the tokens or the texts that end a turn."""

    template: ChatTemplate
    end_tokens: tuple[int, ...]
    end_texts: tuple[str, ...]

    def files(self, others: Mapping[str, bytes]) -> dict[str, bytes]:
        """Return the files of a tokenizer with this template in place of another one; none if there are none.

        The texts of special tokens that the template uses go along, where the files do not have them.
        """
        if not others:
            return {}
        files = {**others, CHAT_TEMPLATE: self.template.text.encode()}
        files.pop(OLD_CHAT_TEMPLATE, None)
        if TOKENIZER_CONFIG in files:
            about = {**self.template.named, **parse_json(files[TOKENIZER_CONFIG])}
            about.pop("chat_template", None)
            files[TOKENIZER_CONFIG] = (json.dumps(about, indent=2) + "\n").encode()
        return files

    def ends(self, generation: Json) -> Json:
        """Return a generation's configuration that also ends at the end of a turn."""
        eos = generation.get("eos_token_id")
        known = eos if isinstance(eos, list) else [] if eos is None else [eos]
        ids = list(dict.fromkeys([*known, *self.end_tokens]))
        return {**generation, "eos_token_id": ids if len(ids) > 1 else next(iter(ids), None)}


def chat_of(saved: Json, config: RunConfig) -> Chat | None:
    """Return how a run was tuned on conversations; None: it was not. saved: the checkpoint's configuration.

    Raises:
        UserError: if its prepared data or its tokenizer is gone.
    """
    objective = saved.get("train", {}).get("objective")
    if not isinstance(objective, dict) or objective.get("name") != "chat" or not config.data.sources:
        return None
    template = load_chat_card(first_source(config)).chat_template()
    reference = tokenizer_reference(config)
    if reference is None:
        raise UserError("the tokenizer of its data is not known")
    return Chat(template, *end_of_turn(template, load_tokenizer(reference)))
