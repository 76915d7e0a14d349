"""A task's options of generation, without the harness."""

from typing import Any

import pytest

from megamoe.apps.generation.sampling import Sampling
from megamoe.apps.lm_eval.options import sampling_of
from megamoe.errors import UserError

NORMALIZED = {"until": ["\n", ""], "max_gen_toks": 5}  # what the harness always adds


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({"do_sample": True, "top_p": 0.9}, 1.0),
        ({"do_sample": True, "temperature": 0.3}, 0.3),
        ({"do_sample": True, "temperature": 0.0}, 0.0),
        ({"do_sample": False, "temperature": 0.0, "top_p": 0.9}, 0.0),
        ({"do_sample": False, "top_k": 3}, 0.0),
    ],
)
def test_temperature(options: dict[str, Any], temperature: float) -> None:
    wanted = Sampling(5, temperature, options.get("top_k"), options.get("top_p"), stop=("\n",))
    assert sampling_of({**NORMALIZED, **options}) == wanted


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(UserError, match="generation_kwargs: num_beams is not supported, expected do_sample"):
        sampling_of({**NORMALIZED, "num_beams": 3, "min_p": None})
