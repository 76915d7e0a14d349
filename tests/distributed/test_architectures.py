"""Encoders and encoder-decoders train at every layout as on one rank, with padding, and resume exactly."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from megamoe.data.batches import Item
from megamoe.objectives.span_corruption import SpanCorruption
from megamoe.parallel import launch
from megamoe.registry import register
from megamoe.train.trainer import Trainer
from tests.checkpoint_files import assert_same_bits, read_tensors
from tests.data.parallel_text.pairs import make_pairs
from tests.distributed.pool import Pool
from tests.distributed.runs import ds_file, in_order, recorded_steps, run_each, small_run

STEPS = 3
SIZES: dict[str, Any] = {
    "model__num_attention_heads": 4,
    "data__sequence_length": 36,
    "train__micro_batch_size": 2,
    "train__global_batch_size": 8,
}
MODELS: dict[str, dict[str, Any]] = {
    "encoder": {
        "model__architecture": "encoder",
        "model__norm_position": "post",
        "model__position": "learned",
        "model__norm": "layernorm",
        "model__head_transform": True,
        "model__attention": {"query_key_norm": "head", "input_bias": True, "scale": 0.5},
        "train__objective": {"name": "masked", "unit": "span"},
        "moe__layers": {"at": [2], "insert_after": [1]},
    },
    "encoder_decoder": {
        "model__architecture": "encoder_decoder",
        "model__position": "sinusoidal",
        "model__scale_embeddings": True,
        "model__bias": True,
        "model__head_size": 6,
        "model__attention": {"query_key_norm": "whole", "input_bias": False},
        "model__activation": "relu",
        "data__document_aware": False,
        "train__objective": {"name": "ragged", "mean_span": 2.0},
        "train__label_smoothing": 0.1,
        "moe__layers": {"encoder": {"at": [2]}, "decoder": {"at": [1], "insert_after": [2]}},
        "moe__router": {
            "scorer": {"name": "linear", "jitter": 0.1},
            "selector": {"name": "top_k", "k": 2},
            "capacity": {"name": "per_expert", "factor": 1.0},
        },
    },
}


class Ragged(SpanCorruption):
    """Pairs of other lengths in each sample, so that micro batches have padding on both sides."""

    def sample(self, item: Item, place: str) -> Item:
        pair, draws = super().sample(item, place), self.draws(f"{place}/lengths")
        return {side: tokens[: int(draws.integers(1, len(tokens) + 1))] for side, tokens in pair.items()}


def with_ragged_pairs() -> None:
    """Register the objective in a rank's process; the tests' own process need not know it."""
    register("objective", "ragged")(Ragged)


@dataclass(frozen=True)
class Layout:
    ranks: int
    tensor: int
    expert: int
    zero: int
    sequence: bool = False
    recompute: str = "none"

    def changes(self, folder: Path) -> dict[str, Any]:
        path = ds_file(folder, f"zero{self.zero}_fp32")
        return {
            "parallel__tensor": self.tensor,
            "parallel__expert": self.expert,
            "parallel__sequence": self.sequence,
            "parallel__deepspeed": path,
            "model__recompute": self.recompute,
        }


TRANSLATION: dict[str, Any] = {
    **MODELS["encoder_decoder"],
    "model__vocab_size": None,
    "moe__num_shared_experts": 0,
    "data__mock": False,
    "data__split": [0.8, 0.2, 0],
    "data__sampling_exponent": 0.5,
    "data__sequence_length": 40,
    "train__objective": {"name": "translation", "bucket": 4, "direction": "both"},
}
ALONE = Layout(1, 1, 1, 0)
LAYOUTS = [
    Layout(4, 2, 2, 0, sequence=True, recompute="full"),
    Layout(4, 1, 2, 3),
    Layout(2, 1, 2, 0),
    Layout(4, 2, 2, 0, recompute="selective"),
    Layout(4, 1, 1, 1),
    Layout(4, 1, 4, 3, recompute="full"),
    Layout(4, 2, 2, 1),
]
NAMES = [*MODELS, "translation"]
# Attention to the encoder is cut by tensor parallelism too. `make test-full` has all layouts of each model.
QUICK = [("encoder_decoder", LAYOUTS[0])]
QUICK_OF_TWO_RANKS = [(name, Layout(2, 1, 2, 3)) for name in ("encoder", "translation")]
OTHERS = [(name, layout) for layout in LAYOUTS for name in NAMES if (name, layout) not in QUICK]


def models(pairs: Path) -> dict[str, dict[str, Any]]:
    """Return all models; pairs: the folder of the pairs that one of them learns from."""
    sources = [{"path": str(pairs / "train")}]
    return {**MODELS, "translation": {**TRANSLATION, "data__sources": sources}}


def runs(pairs: Path, cases: list[tuple[str, Layout]]) -> dict[tuple[str, Layout], dict[str, Any]]:
    """Job: what the steps of each model at its layout showed on this rank, in one world."""
    found = {}
    with_ragged_pairs()
    try:
        with TemporaryDirectory() as folder:
            for name, layout in cases:
                changes = {**SIZES, **models(pairs)[name], **layout.changes(Path(folder))}
                found[name, layout] = recorded_steps(Trainer(small_run(**changes)), STEPS)
    finally:
        launch.stop()
    return found


def ragged_runs(arguments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Job: `run_each`, for runs that may have the objective."""
    with_ragged_pairs()
    return run_each(arguments)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pairs(tmp_path_factory.mktemp("pairs"), [0.8, 0.2, 0])


@pytest.fixture(scope="module")
def alone(pool: Pool, pairs: Path) -> dict[tuple[str, Layout], dict[str, Any]]:
    (found,) = pool.run(runs, pairs, [(name, ALONE) for name in NAMES], ranks=1, timeout_s=300)
    assert all(found[name, ALONE]["lm_loss"][-1] < found[name, ALONE]["lm_loss"][0] for name in MODELS)
    lengths = [sum(masks) for masks in found["translation", ALONE]["masks"]]
    assert len(set(lengths)) > 2  # unequal lengths
    return found


def assert_as_alone(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank in found:
        for word in ("lm_loss", "loss", "grad_norm"):
            assert rank[word] == pytest.approx(expected[word], rel=1e-5), word
    for step, chosen in enumerate(expected["chosen"]):
        together = in_order([rank["chosen"][step] for rank in found]).unique(dim=0)
        assert torch.equal(together, in_order([chosen]).unique(dim=0)), f"other experts in step {step + 1}"


def assert_all_as_alone(
    pool: Pool, pairs: Path, alone: dict[tuple[str, Layout], Any], cases: list[tuple[str, Layout]]
) -> None:
    """Train each model at its layout, all of which have as many ranks."""
    ranks = pool.run(runs, pairs, cases, ranks=cases[0][1].ranks, timeout_s=600)
    for name, layout in cases:
        assert_as_alone([rank[name, layout] for rank in ranks], alone[name, ALONE])


def test_quick_layouts_train_as_one_rank(
    pool: Pool, pairs: Path, alone: dict[tuple[str, Layout], Any]
) -> None:
    assert_all_as_alone(pool, pairs, alone, QUICK)
    assert_all_as_alone(pool, pairs, alone, QUICK_OF_TWO_RANKS)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_train_as_one_rank(
    pool: Pool, pairs: Path, alone: dict[tuple[str, Layout], Any], layout: Layout
) -> None:
    assert_all_as_alone(pool, pairs, alone, [case for case in OTHERS if case[1] == layout])


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_resume_is_exact_and_checkpoints_move(pool: Pool, pairs: Path, tmp_path: Path, name: str) -> None:
    """Bit for bit at the same layout, with dropout; to 1e-5 on one rank, from ZeRO 3 on two."""
    model = {**SIZES, **models(pairs)[name], "train__steps": 4, "data__workers": 1}
    two = {**model, **Layout(2, 1, 2, 3).changes(tmp_path), "model__hidden_dropout": 0.1}
    auto = {"checkpoint__resume": "auto", "save": True}
    whole = {**two, "steps": 4, "output": tmp_path / "whole", "save": True}
    cut = {**two, **auto, "steps": 2, "output": tmp_path / "cut"}
    begun = pool.run(ragged_runs, [whole, cut], ranks=2, timeout_s=300)
    ended = pool.run(ragged_runs, [cut], ranks=2, timeout_s=300)
    for (together, first), (second,) in zip(begun, ended, strict=True):
        for word in ("lm_loss", "loss", "grad_norm", "samples"):
            assert first[word] + second[word] == together[word], word
    last = "small/checkpoints/step_00000004"
    assert_same_bits(*(read_tensors(tmp_path / kind / last) for kind in ("whole", "cut")))
    saved = str(tmp_path / "cut/small/checkpoints/step_00000002")
    further = {"checkpoint__resume": saved, "steps": 2, "model__hidden_dropout": 0.0}
    (moved,) = pool.run(
        ragged_runs, [{**model, **further, "output": tmp_path / "moved"}], ranks=1, timeout_s=300
    )
    cut_in_two = {**Layout(2, 2, 2, 0, sequence=True).changes(tmp_path), **further}
    (other, _) = pool.run(
        ragged_runs, [{**model, **cut_in_two, "output": tmp_path / "other"}], ranks=2, timeout_s=300
    )
    for word in ("lm_loss", "grad_norm"):
        assert other[0][word] == pytest.approx(moved[0][word], rel=1e-5), word
