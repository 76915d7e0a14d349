"""How a task of the harness wants text to be generated."""

from typing import Any

from megamoe.apps.generation.sampling import Sampling
from megamoe.errors import UserError

# Keys of a task's generation_kwargs that `Sampling` has, or that `normalize_gen_kwargs` has used up.
KNOWN_OPTIONS = {"until", "do_sample", "max_gen_toks", "temperature", "top_k", "top_p"}


def sampling_of(options: dict[str, Any]) -> Sampling:
    """Return the options of a generation that a task asks for.

    options: of the harness' `normalize_gen_kwargs`. With `do_sample` and no temperature, the temperature is
    1, as in transformers.

    Raises:
        UserError: for an option that is not known, or a value out of its range.
    """
    unknown = sorted(
        name for name, value in options.items() if name not in KNOWN_OPTIONS and value is not None
    )
    if unknown:
        raise UserError(
            f"generation_kwargs: {unknown[0]} is not supported, expected {', '.join(sorted(KNOWN_OPTIONS))}"
        )
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
