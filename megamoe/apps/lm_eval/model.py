"""A checkpoint as a model of lm-evaluation-harness, with any router, without conversion."""

from typing import Any, TypeVar

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from megamoe.apps.evaluation.trained_model import TrainedModel
from megamoe.apps.generation.generate import generate, tokenizer_of
from megamoe.apps.generation.runner import leave_capacity_out, neighbours
from megamoe.apps.generation.sampling import Sampling
from megamoe.apps.lm_eval.scoring import Answer, Question, answers
from megamoe.errors import UserError

MOST_GENERATED = 256  # tokens, where a task does not say; as for the harness' other models
# Keys of a task's generation_kwargs that `Sampling` has, or that `normalize_gen_kwargs` has used up.
Result = TypeVar("Result")
KNOWN_OPTIONS = {"until", "do_sample", "max_gen_toks", "temperature", "top_k", "top_p"}


def sampling_of(options: dict[str, Any]) -> Sampling:
    """Return the options of a generation that a task asks for.

    options: of the harness' `normalize_gen_kwargs`. With `do_sample` and no temperature, the temperature is
    1, as in transformers.

    Raises:
        UserError: for an option that is not known, or a value out of its range.
    """
    for name, value in options.items():
        if name not in KNOWN_OPTIONS and value is not None:
            known = ", ".join(sorted(KNOWN_OPTIONS))
            raise UserError(f"generation_kwargs: {name} is not supported, expected {known}")
    temperature = options.get("temperature")
    if temperature is None:
        temperature = 1.0 if options.get("do_sample") else 0.0
    return Sampling(
        max_tokens=options["max_gen_toks"],
        temperature=float(temperature),
        top_k=options.get("top_k") or None,
        top_p=options.get("top_p"),
        stop=tuple(text for text in options["until"] if text),
    )


class Megamoe(TemplateLM):
    """A trained decoder, for the harness.

    Every rank is given all requests and returns all results, so the harness sees one process (`rank` 0 of
    `world_size` 1). The ranks divide the work among themselves.

    max_length: of a model's input, in tokens; default: `data.sequence_length`. keep_capacity: keep the
    routers' capacity, which drops pairs by the other tokens of a sequence. A text without context follows the
    end of a document, as in training.

    Raises:
        UserError: if the model has no tokenizer, or an option does not fit it.
    """

    def __init__(
        self,
        trained: TrainedModel,
        batch_size: int = 8,
        max_length: int | None = None,
        keep_capacity: bool = False,
    ) -> None:
        super().__init__()
        self.trained = trained
        self.max_length = self._checked_length(max_length)
        # `TemplateLM` keeps the tokenizer of transformers here for chat templates, which ours do not have.
        self._tokens = tokenizer_of(trained)
        self.notes = [] if keep_capacity else leave_capacity_out(trained)
        # Whole batches are only for models in which a sequence does not depend on the others of its batch.
        self.batch_size = 1 if neighbours(trained) else batch_size

    @property
    def eot_token_id(self) -> int:
        """The id of the end of a document, which is also the harness' `prefix_token_id`."""
        return self._tokens.eod

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's fingerprint, by which the harness keeps its caches of requests apart."""
        return self._tokens.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Return the token ids of a text; no special token is added."""
        return self._tokens.encode(string)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **unused: Any
    ) -> list[Answer]:
        questions = [Question(context, continuation) for _, context, continuation in requests]
        return self._cached("loglikelihood", [texts for texts, _, _ in requests], self._answers(questions))

    def _answers(self, questions: list[Question]) -> list[Answer]:
        return answers(self.trained, questions, self.batch_size, self.max_length)

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
        return self._cached("loglikelihood_rolling", [request.args for request in requests], sums)

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
            ordered = [prompts[place] for place in order]
            results = generate(self.trained, ordered, sampling, batch_size=self.batch_size)
            for place, result in zip(order, results, strict=True):
                texts[numbers[place]] = result.text
        return self._cached("generate_until", [request.args for request in requests], texts)

    def _cached(self, kind: str, asked: list[Any], results: list[Result]) -> list[Result]:
        """Return the results, which the harness' cache keeps too."""
        for request, result in zip(asked, results, strict=True):
            self.cache_hook.add_partial(kind, request, result)
        return results

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
