"""Generates text from prompts, in batches of prompts of different lengths."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.ends import with_all_ends
from megamoe.apps.generation.experts import ExpertRecord, Experts
from megamoe.apps.generation.runner import Runner, check_cache
from megamoe.apps.generation.sampling import Sampling, finite_norms
from megamoe.data.tokenizers import Tokenizer
from megamoe.errors import UserError

END_OF_DOCUMENT = "<end of document>"


@dataclass
class Generated:
    """The result of one prompt.

    prompt, tokens: token ids; `tokens` includes the end of a document that ended it. text: of the generated
    tokens, without a stop text, see `text_of`. reason: why it ended: `length`, `stop`, `end_of_turn` (a stop
    token) or `end_of_document`. experts: of each token of the prompt and of `tokens`, if they were recorded.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = "length"
    experts: list[Experts] = field(default_factory=list)


def tokenizer_of(trained: TrainedModel) -> Tokenizer:
    """Return the tokenizer of the model's data.

    Raises:
        UserError: if there is none.
    """
    tokenizer = trained.vocabulary.tokenizer
    if tokenizer is None:
        raise UserError(
            f"{trained.path}: the tokenizer is unknown (mock data, or its file is gone); "
            "name it with data.tokenizer=PATH"
        )
    return tokenizer


def encoded(trained: TrainedModel, prompts: list[str], max_tokens: int) -> list[list[int]]:
    """Return the token ids of prompts.

    Raises:
        UserError: if a prompt has no token or tokens beyond the vocabulary, or if with the generated tokens
            it has more than the learned positions.
    """
    return checked_prompts(trained, tokenizer_of(trained).encode_batch(prompts), max_tokens)


def checked_prompts(trained: TrainedModel, found: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the prompts, as token ids; raise a UserError as `encoded`."""
    config = trained.config
    for number, tokens in enumerate(found, start=1):
        if not tokens:
            raise UserError(f"prompt {number} is empty; expected at least one token")
        check_tokens(trained, f"prompt {number}", tokens)
        length = len(tokens) + max_tokens
        if config.model.position == "learned" and length > config.data.sequence_length:
            raise UserError(
                f"prompt {number} has {len(tokens)} tokens, with --max-tokens {max_tokens} {length}, but the "
                f"model has learned positions for {config.data.sequence_length} (data.sequence_length); "
                "shorten the prompt or lower --max-tokens"
            )
    return found


def check_tokens(trained: TrainedModel, what: str, tokens: list[int]) -> None:
    """Check that the model has the tokens of a text; what: the beginning of the message.

    Raises:
        UserError: if its vocabulary is smaller.
    """
    size = trained.vocabulary.size
    if tokens and max(tokens) >= size:
        raise UserError(
            f"{what} has token {max(tokens)} of tokenizer {tokenizer_of(trained).name!r}, but the model's "
            f"vocabulary has {size}; name the model's tokenizer with data.tokenizer"
        )


def generate(
    trained: TrainedModel,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    batch_size: int = 8,
    show_experts: bool = False,
    joined: bool = False,
) -> Iterator[Generated]:
    """Yield the result of each prompt, in order. Collective: every rank generates the same tokens.

    joined: the texts are to stand behind their prompts, see `text_of`.

    Raises:
        UserError: as `runner.check_cache`.
    """
    check_cache(trained)
    sampling = with_all_ends(trained, sampling)
    seen: Counter[tuple[int, ...]] = Counter()
    keys = []
    for prompt in prompts:
        keys.append(sampling.key_of(prompt, seen[tuple(prompt)]))
        seen[tuple(prompt)] += 1
    for first in range(0, len(prompts), batch_size):
        batch = slice(first, first + batch_size)
        yield from _generate_batch(trained, prompts[batch], keys[batch], sampling, show_experts, joined)


def _generate_batch(
    trained: TrainedModel,
    prompts: list[list[int]],
    keys: list[int],
    sampling: Sampling,
    show_experts: bool,
    joined: bool,
) -> list[Generated]:
    results = [Generated(prompt) for prompt in prompts]
    banned = [token for token in without_text(trained) if token not in sampling.stop_tokens]
    banned_N = torch.tensor(banned, dtype=torch.int64, device=trained.world.device)
    done, agree = [False] * len(results), agreement(trained)
    record = ExpertRecord()
    observe = record.take if show_experts else None
    runner = Runner(trained, prompts, sampling.max_tokens, observe)
    with record.watching(trained) if show_experts else nullcontext():
        logits_BV = runner.begin()
        for place in range(sampling.max_tokens):
            finite_norms(logits_BV)
            allowed_BV = logits_BV.index_fill(1, banned_N, -math.inf)
            new_B = torch.tensor(sampling.choose(allowed_BV, keys, place), device=trained.world.device)
            agree(new_B)
            new = new_B.tolist()
            for number, token in enumerate(new):
                if not done[number]:
                    done[number] = _append(results[number], token, trained, sampling, joined)
            last = all(done) or place == sampling.max_tokens - 1
            if not last or show_experts:  # the experts of the last token are known after one more pass
                logits_BV = runner.feed(new)
            if last:
                break
    for number, result in enumerate(results):
        if result.reason != "stop":
            result.text = text_of(trained, result.prompt, result.tokens, joined)
        if show_experts:
            length = len(result.prompt) + len(result.tokens)
            result.experts = [record.by_token[number][position] for position in range(length)]
    return results


def agreement(trained: TrainedModel) -> Callable[[Tensor], None]:
    """Return what overwrites a tensor with the first rank's: rounding must not make ranks differ."""
    if trained.world.size == 1:
        return lambda tensor: None
    return lambda tensor: dist.broadcast(tensor, src=0)


def text_of(trained: TrainedModel, prompt: list[int], tokens: list[int], joined: bool) -> str:
    """Return the text of generated tokens.

    joined: with the space between a prompt and what follows it. SentencePiece leaves out a space at the start
    of a text.
    """
    tokenizer = tokenizer_of(trained)
    if joined:
        whole, head = tokenizer.decode(prompt + tokens), tokenizer.decode(prompt)
        if whole.startswith(head):
            return whole.removeprefix(head)
    return tokenizer.decode(tokens)


def _append(result: Generated, token: int, trained: TrainedModel, sampling: Sampling, joined: bool) -> bool:
    """Append a token; return whether the generation of this prompt has ended."""
    result.tokens.append(token)
    if token == trained.vocabulary.eod:
        result.reason = "end_of_document"
        return True
    if token in sampling.stop_tokens:
        result.reason = "end_of_turn"
        return True
    if not sampling.stop:
        return False
    result.text = text_of(trained, result.prompt, result.tokens, joined)
    places = [place for text in sampling.stop if (place := result.text.find(text)) >= 0]
    if places:
        result.text, result.reason = result.text[: min(places)], "stop"
    return bool(places)


def without_text(trained: TrainedModel) -> list[int]:
    """Return the tokens that no model writes: padding, masks, sentinels, tags, and ids that no data has.

    Other reserved tokens may be those of a conversation, which a model writes.
    """
    vocabulary = trained.vocabulary
    special, known = vocabulary.special, vocabulary.data_size
    if vocabulary.tokenizer is not None:  # mock data have any id
        known = min(known, vocabulary.tokenizer.vocab_size)
    reserved = {special.pad, special.mask, *special.sentinels, *special.languages.values()}
    found = {*reserved, *range(known, vocabulary.size)} - {vocabulary.eod}
    return sorted(number for number in found if number is not None)


def token_texts(trained: TrainedModel, tokens: list[int]) -> list[str]:
    """Return the text of each token by itself."""
    tokenizer, eod = tokenizer_of(trained), trained.vocabulary.eod
    return [END_OF_DOCUMENT if token == eod else tokenizer.decode([token]) for token in tokens]
