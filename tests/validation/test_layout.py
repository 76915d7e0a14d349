"""The legal layouts that a refusal names, and scorers that need whole sequences."""

import pytest

from megamoe import registry
from megamoe.config import RunConfig
from megamoe.errors import UserError, raise_first
from megamoe.moe.part import Part
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.layout import layout_problems
from tests.support.refusals import Case, cases
from tests.support.tiny import tiny

# Heads 4, vocabulary multiple 16, sequence length 8, 8 experts of FFN size 16 in every block.
WIDE = ["model.num_attention_heads=4", "moe.num_experts=8", "moe.expert_ffn_hidden_size=16"]


def refuse_layout(config: RunConfig, ranks: int) -> None:
    plan = resolve_parallel(config, ranks)
    raise_first(layout_problems(config, plan.layout, plan.precision))


@pytest.mark.parametrize("case", cases("run", "layout: "))
def test_what_is_called_legal_is(case: Case) -> None:
    with pytest.raises(UserError) as refusal:
        refuse_layout(tiny(*case["overrides"]), case["ranks"])
    if "; legal" not in str(refusal.value):
        return
    message = str(refusal.value).partition("; or start more ranks")[0]
    key, reported = message.split(":")[0], message.rsplit(": ", 1)[1]
    for choice in reported.split(", "):
        sizes = choice.split(" x ")
        keys = [key] if len(sizes) == 1 else [f"parallel.{k}" for k in ("tensor", "expert", "expert_tensor")]
        chosen = [f"{k}={size}" for k, size in zip(keys, sizes, strict=True)]
        refuse_layout(tiny(*case["overrides"], *chosen), case["ranks"])


@pytest.mark.parametrize("key", ["tensor", "context"])
def test_a_scorer_of_several_tokens_needs_whole_sequences(key: str, own_registry: None) -> None:
    """A rank scores its part of a sequence alone, so that a scorer would see other neighbours there."""

    @registry.register("scorer", "of_neighbours")
    class OfNeighbours(Part):
        @classmethod
        def provides(cls, options: object) -> set[str]:
            return {"over_tokens"}

    reason = (
        f"parallel.{key}: 2 gives a rank a part of each sequence, and the scorer of_neighbours reads other"
    )
    for scorer, refused in (("linear", False), ("of_neighbours", True)):
        config = tiny(*WIDE, f"moe.router.scorer={scorer}", f"parallel.{key}=2")
        plan = resolve_parallel(config, 2)
        problems = [str(each) for each in layout_problems(config, plan.layout, plan.precision)]
        assert [problem.startswith(reason) for problem in problems] == [True] * refused
