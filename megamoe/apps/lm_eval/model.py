"""The model class `megamoe` of lm-evaluation-harness: a checkpoint with any router, without conversion.

Importing this file registers the class:

    import lm_eval, megamoe.apps.lm_eval.model
    lm_eval.simple_evaluate(model="megamoe", model_args={"run": "runs/demo"}, tasks=[...])
"""

import atexit
from pathlib import Path
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from megamoe.apps.evaluation.trained_model import Session, TrainedModel
from megamoe.apps.generation.generate import generate, tokenizer_of
from megamoe.apps.generation.runner import neighbours, prepare
from megamoe.apps.generation.sampling import Sampling
from megamoe.apps.lm_eval.options import sampling_of
from megamoe.apps.lm_eval.scoring import Question, answers
from megamoe.errors import UserError
from megamoe.parallel import launch

MOST_GENERATED = 256  # tokens, where a task does not say; as for the harness' other models


@register_model("megamoe")
class Megamoe(TemplateLM):
    """A trained decoder, for the harness.

    Every rank is given all requests and returns all results, so the harness sees one process (`rank` 0 of
    `world_size` 1). The ranks divide the work among themselves.

    run: a run's folder or a step_* folder, or the opened model. precision: as for `Session`. max_length: of a
    model's input, in tokens; default: `data.sequence_length`. prefix_token_id: the token before a text
    without context; default: the end of a document, as in training. keep_capacity: keep the routers'
    capacity, which drops pairs by the other tokens of a sequence.

    Raises:
        UserError: if the model cannot be opened, has no tokenizer, or an option does not fit it.
    """

    def __init__(
        self,
        run: str | TrainedModel,
        batch_size: int | str = 8,
        precision: str | None = None,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
        keep_capacity: bool = False,
        **unused: Any,
    ) -> None:
        super().__init__()
        if unnamed := {name for name, value in unused.items() if value is not None} - {"device"}:
            raise UserError(f"model_args: {min(unnamed)} is not known to the model class megamoe")
        if isinstance(run, str):
            atexit.register(launch.stop)
            run = Session(launch.find_world(), precision=precision).open(Path(run))
        self.trained = run
        self.max_length = self._checked_length(max_length)
        # `TemplateLM` keeps the tokenizer of transformers here for chat templates, which ours do not have.
        self._tokens = tokenizer_of(run)
        self._prefix = self._tokens.eod if prefix_token_id is None else int(prefix_token_id)
        if not 0 <= self._prefix < run.vocabulary.size:
            raise UserError(
                f"--prefix-token: found {self._prefix}, expected an id below {run.vocabulary.size}"
            )
        self._cached, self.notes = prepare(run, keep_capacity, cache=True)
        # Whole batches are only for models in which a sequence does not depend on the others of its batch.
        alone = bool(neighbours(run, keep_capacity))
        self.batch_size = 1 if alone else _batch_size(batch_size)

    @property
    def eot_token_id(self) -> int:
        """The id of the end of a document."""
        return self._tokens.eod

    @property
    def prefix_token_id(self) -> int:
        """The id of the token before a text without context."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's fingerprint, by which the harness keeps its caches of requests apart."""
        return self._tokens.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Return the token ids of a text; no special token is added."""
        return self._tokens.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **unused: Any
    ) -> list[tuple[float, bool]]:
        questions = [Question(context, continuation) for _, context, continuation in requests]
        found = self._answers(questions)
        for (texts, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def _answers(self, questions: list[Question]) -> list[tuple[float, bool]]:
        found = answers(self.trained, questions, self.batch_size, self.max_length)
        return [(answer.log_likelihood, answer.is_greedy) for answer in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in nats; a long one is cut into windows.

        Each token is predicted once, after as many tokens as the model reads, or after the prefix token.
        """
        windows, counts = [], []
        for request in requests:
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found = [Question(*utils.make_disjoint_window(window)) for window in rolling]
            windows += found
            counts.append(len(found))
        values = iter(self._answers(windows))
        sums = [sum(next(values)[0] for _ in range(count)) for count in counts]
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, up to a stop text or the end of a document."""
        texts = [""] * len(requests)
        groups: dict[Sampling, list[int]] = {}
        for number, request in enumerate(requests):
            options = normalize_gen_kwargs(request.args[1], MOST_GENERATED)
            groups.setdefault(sampling_of(dict(options)), []).append(number)
        for sampling, numbers in groups.items():
            prompts = [self._prompt(requests[number].args[0], sampling) for number in numbers]
            order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
            results = generate(
                self.trained,
                [prompts[place] for place in order],
                sampling,
                batch_size=self.batch_size,
                cached=self._cached,
            )
            for place, result in zip(order, results, strict=True):
                texts[numbers[place]] = result.text
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _prompt(self, context: str, sampling: Sampling) -> list[int]:
        """Return the last tokens of a context that leave room for the generated ones."""
        room = self.max_length - sampling.max_tokens
        if room < 1:
            raise UserError(
                f"a task generates up to {sampling.max_tokens} tokens (max_gen_toks), but the model reads "
                f"{self.max_length} with the prompt; give the task fewer, or raise --max-length"
            )
        return self.tok_encode(context)[-room:] or [self.prefix_token_id]

    def _checked_length(self, given: int | None) -> int:
        config = self.trained.config
        length = config.data.sequence_length if given is None else int(given)
        if length < 2:
            raise UserError(f"--max-length: found {length}, expected at least 2 tokens")
        if config.model.position == "learned" and length > config.data.sequence_length:
            raise UserError(
                f"--max-length: found {length}, but the model has learned positions for "
                f"{config.data.sequence_length} (data.sequence_length)"
            )
        return length


def _batch_size(given: int | str) -> int:
    try:
        size = int(given)
    except ValueError:
        size = 0
    if size < 1:
        raise UserError(f"--batch-size: found {given}, expected a number of at least 1")
    return size
