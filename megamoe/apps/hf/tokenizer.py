"""The tokenizer of a run that was never imported: its files and special ids, as transformers reads them."""

import json
from pathlib import Path

from megamoe.apps.hf.folder import LARGEST_FILE, read_other_files
from megamoe.config import RunConfig
from megamoe.data.card import load_card
from megamoe.data.special import PAD_NAMES, SpecialTokens
from megamoe.data.tokenizers import END_OF_DOCUMENT_NAMES, is_bytes, load_tokenizer
from megamoe.errors import UserError
from megamoe.io import read_plain

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_files(config: RunConfig) -> dict[str, bytes]:
    """Return the files by name; none if the tokenizer is not of Hugging Face's kinds, or its files are gone.

    Those of a folder are copied. A tokenizer.json gets the file that names its class and its last token.
    """
    path = _path_of(config)
    if path is None or not path.exists():
        return {}
    if path.is_dir():
        return read_other_files(path)
    if path.suffix != ".json":
        return {}
    try:
        content = read_plain(path, LARGEST_FILE)
        added = json.loads(content).get("added_tokens", [])
        known = {token["content"] for token in added}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    names = [name for name in END_OF_DOCUMENT_NAMES if name in known]
    if names:
        about["eos_token"] = names[0]
    pads = [name for name in PAD_NAMES if name in known]
    if pads:
        about["pad_token"] = pads[0]
    return {TOKENIZER: content, TOKENIZER_CONFIG: (json.dumps(about, indent=2) + "\n").encode()}


def special_ids(config: RunConfig) -> dict[str, int | None]:
    """Return the ids that end, begin and fill a text, by their keys of config.json.

    The end is the end-of-document token of the run's tokenizer. None: there is no such token. Each key is
    there: transformers would otherwise take the ids of the class's first model, which are other words here.
    """
    found: dict[str, int | None] = dict.fromkeys(SPECIAL_IDS)
    try:
        if config.data.tokenizer is not None:
            tokenizer = load_tokenizer(config.data.tokenizer)
            eod, special = tokenizer.eod, tokenizer.special
        elif config.data.sources and (card := load_card(config.data.sources[0].path)) is not None:
            eod, special = card.tokenizer.eod, SpecialTokens(card.tokenizer.special)
        else:
            return found
    except UserError:  # it is no longer there
        return found
    return found | {"eos_token_id": eod, "pad_token_id": special.pad}


def _path_of(config: RunConfig) -> Path | None:
    """Return the tokenizer that `data.tokenizer` or the card of the first source names."""
    if config.data.tokenizer is not None:
        return None if is_bytes(config.data.tokenizer) else Path(config.data.tokenizer)
    if not config.data.sources:
        return None
    try:
        card = load_card(config.data.sources[0].path)
    except UserError:
        return None
    if card is None or is_bytes(card.tokenizer.reference):
        return None
    return Path(config.data.sources[0].path).parent / card.tokenizer.reference
