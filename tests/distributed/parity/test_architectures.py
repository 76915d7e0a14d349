"""Encoders and encoder-decoders train at every layout as on one rank, with padding, and resume exactly."""

from pathlib import Path
from typing import Any

import pytest

from megamoe.data.batches import Item
from megamoe.registry import register
from megamoe.zoo.objectives.span_corruption import SpanCorruption
from tests.support.checkpoint_files import assert_same_bits, read_tensors
from tests.support.data.pairs import make_pairs
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import WORDS, Place, assert_as_alone, run_each

STEPS = 2
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
LAYOUTS = [
    Place(4, tensor=2, expert=2, sequence=True, recompute="full"),
    Place(4, expert=2, zero=3),
    Place(2, expert=2),
    Place(4, tensor=2, expert=2, recompute="selective"),
    Place(4, zero=1),
    Place(4, expert=4, zero=3, recompute="full"),
    Place(4, tensor=2, expert=2, zero=1),
]
NAMES = [*MODELS, "translation"]
# Attention to the encoder is cut by tensor parallelism too. `make test-full` has all layouts of each model.
QUICK = [("encoder_decoder", LAYOUTS[0])]
QUICK_OF_TWO_RANKS = [(name, Place(2, expert=2, zero=1)) for name in ("encoder", "translation")]
OTHERS = [(name, place) for place in LAYOUTS for name in NAMES if (name, place) not in QUICK]


def models(pairs: Path) -> dict[str, dict[str, Any]]:
    """Return all models; pairs: the folder of the pairs that one of them learns from."""
    sources = [{"path": str(pairs / "train")}]
    return {**MODELS, "translation": {**TRANSLATION, "data__sources": sources}}


def ragged_runs(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Job: `run_each`, for runs that may have the objective."""
    with_ragged_pairs()
    return run_each(runs)


def trained(
    pool: Pool, pairs: Path, cases: list[tuple[str, Place]], folder: Path
) -> list[list[dict[str, Any]]]:
    """Return what each rank showed of each model at its place; all places have as many ranks."""
    known = models(pairs)
    runs = [{"steps": STEPS, **SIZES, **known[name], **place.changes(folder)} for name, place in cases]
    ranks = pool.run(ragged_runs, runs, ranks=cases[0][1].ranks, timeout_s=600)
    return [list(found) for found in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pairs(tmp_path_factory.mktemp("pairs"), [0.8, 0.2, 0])


@pytest.fixture(scope="module")
def alone(pool: Pool, pairs: Path) -> dict[str, dict[str, Any]]:
    shown = trained(pool, pairs, [(name, Place()) for name in NAMES], pairs)
    found = {name: one for name, (one,) in zip(NAMES, shown, strict=True)}
    assert all(found[name]["lm_loss"][-1] < found[name]["lm_loss"][0] for name in MODELS)
    lengths = [sum(masks) for masks in found["translation"]["masks"]]
    assert len(set(lengths)) > 1  # unequal lengths
    return found


def test_quick_layouts_train_as_one_rank(pool: Pool, pairs: Path, alone: Any, tmp_path: Path) -> None:
    for cases in (QUICK, QUICK_OF_TWO_RANKS):
        for (name, _), found in zip(cases, trained(pool, pairs, cases, tmp_path), strict=True):
            assert_as_alone(found, alone[name], name)


@pytest.mark.full
@pytest.mark.parametrize("place", LAYOUTS, ids=str)
def test_layouts_train_as_one_rank(pool: Pool, pairs: Path, alone: Any, tmp_path: Path, place: Place) -> None:
    cases = [case for case in OTHERS if case[1] == place]
    for (name, _), found in zip(cases, trained(pool, pairs, cases, tmp_path), strict=True):
        assert_as_alone(found, alone[name], name)


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_resume_is_exact_and_checkpoints_move(pool: Pool, pairs: Path, tmp_path: Path, name: str) -> None:
    """Bit for bit at the same layout, with dropout; to 1e-5 on one rank, from ZeRO 3 on two."""
    model = {**SIZES, **models(pairs)[name], "train__steps": 4, "data__workers": 1}
    two = {**model, **Place(2, expert=2, zero=3).changes(tmp_path), "model__hidden_dropout": 0.1}
    auto = {"checkpoint__resume": "auto", "save": True}
    whole = {**two, "steps": 4, "output": tmp_path / "whole", "save": True}
    cut = {**two, **auto, "steps": 2, "output": tmp_path / "cut"}
    begun = pool.run(ragged_runs, [whole, cut], ranks=2, timeout_s=300)
    ended = pool.run(ragged_runs, [cut], ranks=2, timeout_s=300)
    for (together, first), (second,) in zip(begun, ended, strict=True):
        for word in (*WORDS, "samples"):
            assert first[word] + second[word] == together[word], word
    last = "small/checkpoints/step_00000004"
    assert_same_bits(*(read_tensors(tmp_path / kind / last) for kind in ("whole", "cut")))
    saved = str(tmp_path / "cut/small/checkpoints/step_00000002")
    further = {"checkpoint__resume": saved, "steps": 2, "model__hidden_dropout": 0.0}
    run = {**model, **further, "output": tmp_path / "moved"}
    (moved,) = pool.run(ragged_runs, [run], ranks=1, timeout_s=300)
    run |= {**Place(2, tensor=2, expert=2, sequence=True).changes(tmp_path), "output": tmp_path / "other"}
    (other, _) = pool.run(ragged_runs, [run], ranks=2, timeout_s=300)
    for word in ("lm_loss", "grad_norm"):
        assert other[0][word] == pytest.approx(moved[0][word], rel=1e-5), word
