"""Configurations that cannot run are refused in one line, before anything is allocated."""

import random
from collections.abc import Callable

import pytest

from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.architecture import size_problems
from megamoe.validation.run import validate
from tests.support.refusals import Case, cases, refusal
from tests.support.tiny import tiny

LATENT = "model.latent={key_value_rank: 6, nope_size: 4, rope_size: 2, value_size: 4}"
REFUSED = [case.values[0] for case in cases("run", "run: ")]


@pytest.mark.parametrize("case", cases("run"))
def test_what_each_run_is_told(case: Case, expect_message: Callable[..., None]) -> None:
    """All problems of a refused run; none of one that is accepted."""
    expect_message(case, refusal(case.row))


def test_latent_attention_is_no_cross_attention() -> None:
    """An encoder_decoder needs pairs of texts, without which the run is refused earlier."""
    model = tiny(LATENT, "model.architecture=encoder_decoder").model
    assert [problem.key for problem in size_problems(model)] == ["model.architecture"]


def test_many_problems_do_not_disturb_each_other() -> None:
    """Five cases at a time: no check fails because of what another one refuses, and none says it again."""
    draws = random.Random(1)
    for _ in range(60):
        overrides = [each for case in draws.sample(REFUSED, 5) for each in case["overrides"]]
        config = tiny(*overrides)
        found = list(validate(config, 1, resolve_parallel(config, 1)))
        assert len({str(problem) for problem in found}) == len(found) > 0
