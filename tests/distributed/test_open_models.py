"""What today's open models have beside standard blocks trains at every layout as on one rank, and moves."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from megamoe.parallel import launch
from megamoe.train.trainer import Trainer
from tests.distributed.pool import Pool
from tests.distributed.runs import ds_file, recorded_steps, run_each, small_run

STEPS = 3
WORDS = ("lm_loss", "loss", "grad_norm")
SIZES: dict[str, Any] = {
    "model__num_attention_heads": 4,
    "train__micro_batch_size": 2,
    "train__global_batch_size": 8,
}
# Granite: factors everywhere, and shared experts of a size of their own; a bound on the logits beside them.
GRANITE: dict[str, Any] = {
    "model__residual_scale": 0.4,
    "model__embedding_scale": 6.0,
    "model__logit_scale": 0.25,
    "model__logit_soft_cap": 5.0,
    "model__bias": True,
    "model__tie_embeddings": False,
    "moe__num_shared_experts": 1,
    "moe__shared_expert_mode": "gated",
    "moe__shared_expert_ffn_hidden_size": 24,
    "moe__router": {
        "scorer": {"name": "linear", "bias": True},
        "selector": {"name": "top_k", "k": 2, "weights": "kept_softmax"},
    },
}
# gpt-oss: biases of the experts, which are cut like their weights, and its activation in dense blocks too.
GPT_OSS: dict[str, Any] = {
    "model__activation": "swiglu_clamped",
    "moe__expert_bias": True,
    "moe__num_shared_experts": 0,
    "moe__expert_activation_dropout": 0.1,
    "moe__router": GRANITE["moe__router"],
    "optimizer__weight_decay": 0.1,
}
# DeepSeek-V3's multi-token prediction, over packed documents; its blocks are MoE like the last one.
AHEAD: dict[str, Any] = {
    "model__multi_token_prediction": {"depth": 2, "weight": 0.5},
    "model__hidden_size": 32,
    "train__label_smoothing": 0.1,
    "moe__router": {
        "scorer": {"name": "linear", "jitter": 0.1},
        "score_function": {"name": "sigmoid", "bias_update": 0.01},
        "selector": {"name": "top_k", "k": 2, "scale": 2.5},
    },
}
MODELS: dict[str, dict[str, Any]] = {"granite": GRANITE, "gpt_oss": GPT_OSS, "ahead": AHEAD}


@dataclass(frozen=True)
class Layout:
    ranks: int
    tensor: int
    expert: int
    expert_tensor: int
    zero: int
    sequence: bool = False
    recompute: str = "none"

    def changes(self, folder: Path) -> dict[str, Any]:
        """Return the changes for `small_run`; folder: receives a separate DeepSpeed file."""
        path = ds_file(folder, f"zero{self.zero}_fp32")
        return {
            "parallel__tensor": self.tensor,
            "parallel__expert": self.expert,
            "parallel__expert_tensor": self.expert_tensor,
            "parallel__sequence": self.sequence,
            "parallel__deepspeed": path,
            "model__recompute": self.recompute,
        }


ALONE = Layout(1, 1, 1, 1, 0)
LAYOUTS = [
    Layout(4, 2, 2, 2, 1, sequence=True, recompute="full"),
    Layout(2, 2, 1, 1, 0),
    Layout(2, 1, 2, 1, 3),
    Layout(4, 1, 2, 2, 2, recompute="selective"),
    Layout(4, 2, 2, 1, 3, sequence=True),
]
QUICK = LAYOUTS[0]
Found = dict[tuple[str, Layout], dict[str, Any]]


def runs(cases: list[tuple[str, Layout]]) -> Found:
    """Job: what the steps of each model at its layout showed on this rank, in one world."""
    found = {}
    try:
        with TemporaryDirectory() as folder:
            for name, layout in cases:
                changes = {**SIZES, **MODELS[name], **layout.changes(Path(folder))}
                found[name, layout] = recorded_steps(Trainer(small_run(**changes)), STEPS)
    finally:
        launch.stop()
    return found


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Found:
    found: Found = pool.run(runs, [(name, ALONE) for name in MODELS], ranks=1, timeout_s=300)[0]
    assert all(shown["lm_loss"][-1] < shown["lm_loss"][0] for shown in found.values())
    return found


def assert_as_alone(pool: Pool, alone: Found, layout: Layout) -> None:
    cases = [(name, layout) for name in MODELS]
    for rank in pool.run(runs, cases, ranks=layout.ranks, timeout_s=600):
        for name, _ in cases:
            for word in WORDS:
                expected = pytest.approx(alone[name, ALONE][word], rel=1e-5)
                assert rank[name, layout][word] == expected, f"{name}: {word}"


def test_a_layout_of_all_kinds_trains_as_one_rank(pool: Pool, alone: Found) -> None:
    assert_as_alone(pool, alone, QUICK)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_layouts_train_as_one_rank(pool: Pool, alone: Found, layout: Layout) -> None:
    assert_as_alone(pool, alone, layout)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_move_between_layouts(pool: Pool, tmp_path: Path, name: str) -> None:
    """From every layout to one rank and to TP 2 x EP 2, with the same steps afterwards."""
    model = {**SIZES, **MODELS[name], "train__steps": 4}
    for number, layout in enumerate(LAYOUTS):
        first = {**model, **layout.changes(tmp_path), "output": tmp_path / str(number)}
        whole = {**first, "steps": 4, "name": "whole"}
        pool_of = {"ranks": layout.ranks, "timeout_s": 300}
        expected, _ = pool.run(run_each, [whole, {**first, "steps": 2, "save": True}], **pool_of)[0]
        saved = str(tmp_path / str(number) / "small/checkpoints/step_00000002")
        for target in (ALONE, LAYOUTS[0], LAYOUTS[2]):
            further = {**model, **target.changes(tmp_path), "checkpoint__resume": saved, "steps": 2}
            (found,) = pool.run(run_each, [further], ranks=target.ranks, timeout_s=300)[0]
            for word in WORDS:
                after = pytest.approx(expected[word][2:], rel=1e-5)
                assert found[word] == after, f"{layout} -> {target}: {word}"
