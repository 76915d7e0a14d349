"""Illegal layouts are refused in one line: the key, its value, the reason, and legal values."""

import re

import pytest

from megamoe import registry
from megamoe.config import RunConfig
from megamoe.errors import UserError, raise_first
from megamoe.moe.part import Part
from megamoe.parallel.layout import Layout
from megamoe.parallel.zero.deepspeed_config import resolve_parallel
from megamoe.validation.layout import layout_problems, misfits
from tests.support.tiny import check_on, tiny

# Heads 4, vocabulary multiple 16, sequence length 8, 8 experts of FFN size 16 in every block.
WIDE = ["model.num_attention_heads=4", "moe.num_experts=8", "moe.expert_ffn_hidden_size=16"]
# (overrides, ranks, the line from the key on)
REFUSALS: dict[str, tuple[list[str], int, str]] = {
    "tensor and the ranks": (
        ["parallel.tensor=3", "model.num_attention_heads=3", "model.hidden_size=24"],
        4,
        "tensor: 3 does not divide the number of ranks 4; legal on 4 ranks with expert 1, expert_tensor 1: 1",
    ),
    "heads": (
        ["parallel.tensor=4", "model.num_attention_heads=2"],
        4,
        "tensor: 4 does not divide model.num_attention_heads 2; "
        "legal on 4 ranks with expert 1, expert_tensor 1: 1, 2",
    ),
    "query groups": (
        ["parallel.tensor=4", "model.num_query_groups=2"],
        8,
        "tensor: 4 does not divide model.num_query_groups 2; "
        "legal on 8 ranks with expert 1, expert_tensor 1: 1, 2",
    ),
    "FFN of the dense blocks": (
        ["parallel.tensor=4", "moe.layers={at: [2]}", "model.ffn_hidden_size=22"],
        4,
        "tensor: 4 does not divide the dense blocks' FFN size 22; "
        "legal on 4 ranks with expert 1, expert_tensor 1: 1, 2",
    ),
    "vocabulary": (
        ["parallel.tensor=4", "model.vocab_multiple=2"],
        4,
        "tensor: 4 does not divide model.vocab_multiple 2; "
        "legal on 4 ranks with expert 1, expert_tensor 1: 1, 2",
    ),
    "sequence length": (
        ["parallel.tensor=4", "data.sequence_length=6"],
        4,
        "tensor: 4 does not divide data.sequence_length 6; "
        "legal on 4 ranks with expert 1, expert_tensor 1: 1, 2",
    ),
    "expert and the ranks": (
        ["parallel.expert=8", "parallel.tensor=2"],
        4,
        "expert: 8 does not divide the number of ranks 4; "
        "legal on 4 ranks with tensor 2, expert_tensor 1: 1, 2, 4",
    ),
    "experts": (
        ["parallel.expert=4", "moe.num_experts=6"],
        4,
        "expert: 4 does not divide moe.num_experts 6; legal on 4 ranks with tensor 1, expert_tensor 1: 1, 2",
    ),
    "experts, beside slices": (
        ["parallel.expert=4", "parallel.expert_tensor=2", "moe.num_experts=6"],
        8,
        "expert: 4 does not divide moe.num_experts 6; legal on 8 ranks with tensor 1, expert_tensor 2: 1, 2",
    ),
    "slices and the ranks": (
        ["parallel.expert_tensor=4"],
        2,
        "expert_tensor: 4 does not divide the number of ranks 2; "
        "legal on 2 ranks with tensor 1, expert 1: 1, 2",
    ),
    "slices and expert together": (
        ["parallel.expert_tensor=2", "parallel.expert=4"],
        4,
        r"expert_tensor: 2 does not divide the number of ranks \(with parallel.expert 4\) 4; "
        "legal on 4 ranks with tensor 1, expert 4: 1",
    ),
    "FFN of an expert": (
        ["parallel.expert_tensor=8", "moe.expert_ffn_hidden_size=20"],
        8,
        "expert_tensor: 8 does not divide moe.expert_ffn_hidden_size 20; "
        "legal on 8 ranks with tensor 1, expert 1: 1",
    ),
    "slices off the grouped product's unit": (
        ["parallel.expert_tensor=2", "moe.expert_ffn_hidden_size=12"],
        2,
        "expert_tensor: 2 cuts experts of FFN size 12 into slices that are no multiple of 4, .* in fp32; "
        "legal on 2 ranks with tensor 1, expert 1: 1",
    ),
    "the unit in bf16": (
        ["parallel.expert_tensor=4", "parallel.precision=bf16"],
        4,
        "expert_tensor: 4 cuts experts of FFN size 16 into slices that are no multiple of 8, .* in bf16; "
        "legal on 4 ranks with tensor 1, expert 1: 1, 2",
    ),
    "sub-layers": (
        ["parallel.expert_tensor=2", "moe.expert_sublayers=3"],
        2,
        "expert_tensor: 2 cannot cut experts of 3 sub-layers, with norms inside; "
        "legal on 2 ranks with tensor 1, expert 1: 1",
    ),
    "experts of a dense model": (
        ["parallel.expert=2", "moe.layers=none"],
        2,
        r"expert: 2 has nothing to divide: no block is MoE \(moe.layers\); "
        "legal on 2 ranks with tensor 1, expert_tensor 1: 1",
    ),
    "slices in a dense model": (
        ["parallel.expert_tensor=2", "moe.layers=none"],
        2,
        r"expert_tensor: 2 has nothing to divide: no block is MoE \(moe.layers\); "
        "legal on 2 ranks with tensor 1, expert 1: 1",
    ),
    "sequence without tensor": (
        ["parallel.sequence=true"],
        2,
        "sequence: true needs parallel.tensor above 1; set it to false",
    ),
    # With tensor 3 whatever expert there is stays wrong.
    "no value of the key is legal": (
        ["parallel.tensor=3", "parallel.expert=3"],
        2,
        "tensor: 3 does not divide the number of ranks 2; legal tensor x expert x expert_tensor on 2 ranks: "
        "1 x 1 x 1, 1 x 1 x 2, 1 x 2 x 1, 2 x 1 x 1, 2 x 1 x 2, 2 x 2 x 1",
    ),
}
LEGAL: dict[str, tuple[list[str], int]] = {
    "all together": (["parallel.tensor=2", "parallel.expert=2", "parallel.expert_tensor=2"], 8),
    "with sequence": (["parallel.tensor=4", "parallel.sequence=true"], 4),
    "experts across tensor ranks": (["parallel.tensor=4", "parallel.expert=4"], 4),
    "slices without tensor": (["parallel.expert_tensor=4"], 4),
    "more slices than tensor ranks": (["parallel.tensor=2", "parallel.expert_tensor=4"], 8),
    "query groups": (["parallel.tensor=2", "model.num_query_groups=2"], 2),
    "no dense FFN to cut": (["parallel.tensor=4", "model.ffn_hidden_size=21"], 4),
    "a dense model": (["parallel.tensor=2", "moe.layers=none"], 4),
    "sub-layers": (["parallel.tensor=2", "parallel.expert=4", "moe.expert_sublayers=3"], 4),
    "six ranks": (["parallel.tensor=2", "parallel.expert=3", "moe.num_experts=9"], 6),
}


def refuse_layout(config: RunConfig, ranks: int) -> None:
    plan = resolve_parallel(config, ranks)
    raise_first(layout_problems(config, plan.layout, plan.precision))


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_in_one_line(case: str) -> None:
    overrides, ranks, line = REFUSALS[case]
    with pytest.raises(UserError) as refusal:
        refuse_layout(tiny(*WIDE, *overrides), ranks)
    message = str(refusal.value)
    assert re.fullmatch(f"parallel.{line}", message), message


def test_a_run_is_refused_before_anything_else_of_its_layout_is_asked() -> None:
    with pytest.raises(UserError, match="^parallel.tensor: 3 does not divide the number of ranks 4"):
        check_on(tiny(*WIDE, "parallel.tensor=3", "train.global_batch_size=5"), 4)


@pytest.mark.parametrize("case", LEGAL)
def test_what_fits_passes(case: str) -> None:
    overrides, ranks = LEGAL[case]
    check_on(tiny(*WIDE, *overrides), ranks)


@pytest.mark.parametrize("case", [case for case, (_, _, line) in REFUSALS.items() if "; legal" in line])
def test_what_is_called_legal_is(case: str) -> None:
    overrides, ranks, _ = REFUSALS[case]
    config = tiny(*WIDE, *overrides)
    with pytest.raises(UserError) as refusal:
        refuse_layout(config, ranks)
    key, reported = str(refusal.value).split(":")[0], str(refusal.value).rsplit(": ", 1)[1]
    for choice in reported.split(", "):
        sizes = choice.split(" x ")
        keys = [key] if len(sizes) == 1 else [f"parallel.{k}" for k in ("tensor", "expert", "expert_tensor")]
        chosen = [f"{k}={size}" for k, size in zip(keys, sizes, strict=True)]
        refuse_layout(tiny(*WIDE, *overrides, *chosen), ranks)


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


def test_every_problem_of_a_layout_is_reported() -> None:
    config = tiny(*WIDE, "moe.expert_sublayers=2")
    keys = [key for key, _ in misfits(config, Layout(6, tensor=4, expert=5, expert_tensor=4), "fp32")]
    assert keys == ["tensor", "expert", "expert", "expert_tensor", "expert_tensor"]
