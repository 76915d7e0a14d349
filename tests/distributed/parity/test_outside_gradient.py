"""What a run's layers learn without gradient, at every ZeRO stage and precision, on two ranks of EP 2."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor

from megamoe.moe.router import Router
from megamoe.moe.routing import Routing
from megamoe.moe.score_functions.sigmoid import SigmoidScoreFunction
from megamoe.moe.scorers.cosine import CosineScorer
from megamoe.parallel.zero.engine import Engine
from megamoe.train.trainer import Trainer
from megamoe.zoo.scorers.stable import StableScorer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import ds_file, small_run

RANKS = 2
QUICK = "zero1_bf16"
FILES = [f"zero{stage}_{precision}" for stage in (0, 1, 2, 3) for precision in ("fp32", "bf16")]
UPDATE = 0.25
LR = 1e-2
FREEZES_AT = 2
Found = dict[str, Any]

COSINE: Found = {"moe__router": {"scorer": "cosine"}, "moe__losses": {}}
BIASED: Found = {
    "moe__router": {"scorer": "linear", "score_function": {"name": "sigmoid", "bias_update": UPDATE}},
    "moe__losses": {},
}
STABLE: Found = {
    "moe__router": {
        "scorer": {"name": "stable", "phase_1_steps": FREEZES_AT, "routing_dim": 4},
        "score_function": "sigmoid",
        "selector": {"name": "top_k", "k": 1, "weights": "raw"},
    },
    "moe__losses": {"stable_distillation": 1.0},
}


def all_runs(path: str) -> Found:
    """Job: of each run with a DeepSpeed file, what this rank's parts hold after its steps."""
    layout = {"parallel__expert": RANKS, "parallel__deepspeed": path}
    return {
        "cosine": _embeddings(_start(COSINE, layout)),
        "bias": _bias(_start(BIASED, layout)),
        "stable": _light_routers(_start(STABLE, layout)),
    }


def _start(run: Found, layout: Found) -> Trainer:
    return Trainer(small_run(optimizer__lr=LR, train__global_batch_size=4, **run, **layout))


def _parts(trainer: Trainer, kind: type) -> list[Any]:
    trainer.release()
    return [part for part in trainer.engine.model.modules() if isinstance(part, kind)]


def _master(engine: Engine, parameter: Any) -> Tensor:
    if engine.stage > 0:
        whole: Tensor = safe_get_full_fp32_param(parameter)
        return whole.clone()
    return engine.inner_optimizer.master_of(parameter).detach().clone()  # type: ignore[attr-defined]


def _whole(trainer: Trainer, parameter: Any) -> Tensor:
    with trainer.engine.gathered([parameter]):
        whole: Tensor = parameter.detach().float().clone()
    return whole


def _embeddings(trainer: Trainer) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(at the start, weight, master) of the experts' embeddings after a step."""
    names = [name for name, _ in trainer.engine.model.named_parameters() if name.endswith("scorer.embedding")]
    before = [_whole(trainer, trainer.engine.model.get_parameter(name)) for name in names]
    trainer.step()
    after = [part.embedding for part in _parts(trainer, CosineScorer)]
    masters = [_master(trainer.engine, weight) for weight in after]
    return list(zip(before, [_whole(trainer, weight) for weight in after], masters, strict=True))


def _bias(trainer: Trainer) -> tuple[Tensor, Tensor]:
    """(bias after a step, this rank's wanted pairs of it), both [E]."""
    counts: list[Tensor] = []

    def note(router: Router, inputs: tuple[Any, ...], routing: Routing) -> None:
        counts.append(torch.bincount(routing.wanted.expert_N, minlength=routing.num_experts))

    for module in trainer.engine.model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(note)
    trainer.step()
    (score_function,) = _parts(trainer, SigmoidScoreFunction)
    return score_function.bias_E.clone(), torch.stack(counts).sum(0)


def _light_routers(trainer: Trainer) -> list[dict[str, Tensor]]:
    """Its weights and what is frozen of them, after each of three steps."""
    shown = []
    for _ in range(FREEZES_AT + 1):
        trainer.step()
        (scorer,) = (part for part in trainer.engine.model.modules() if isinstance(part, StableScorer))
        names = ("light_embedding", "light_centroids", "frozen", "frozen_embedding", "frozen_centroids")
        shown.append({name: _whole(trainer, getattr(scorer, name)) for name in names})
    trainer.release()
    return shown


@pytest.mark.parametrize(
    "file", [QUICK, *(pytest.param(file, marks=pytest.mark.full) for file in FILES if file != QUICK)]
)
def test_embeddings_biases_and_light_routers(pool: Pool, tmp_path: Path, file: str) -> None:
    found = pool.run(all_runs, ds_file(tmp_path, file), ranks=RANKS)
    for rank in found:
        assert_at_their_norm(rank["cosine"], rtol=4e-3 if "bf16" in file else 0)
        assert_frozen_at_its_step(rank["stable"])
    assert_against_the_load_of_all_ranks([rank["bias"] for rank in found])


def assert_at_their_norm(embeddings: list[tuple[Tensor, Tensor, Tensor]], rtol: float) -> None:
    """Both weights and masters."""
    assert embeddings
    for before_ED, weight_ED, master_ED in embeddings:
        assert (weight_ED - before_ED).abs().max() > LR / 4  # a step was taken
        torch.testing.assert_close(master_ED.norm(dim=1), torch.full((8,), 0.1), rtol=1e-5, atol=0)
        torch.testing.assert_close(weight_ED, master_ED, rtol=rtol, atol=0)


def assert_against_the_load_of_all_ranks(found: list[tuple[Tensor, Tensor]]) -> None:
    biases, counts = zip(*found, strict=True)
    whole_E = sum(counts).double()
    expected_E = -UPDATE * (whole_E - whole_E.mean()).sign().float()
    assert expected_E.abs().sum() > 0
    for bias_E in biases:
        assert torch.equal(bias_E, expected_E)
    alone = [-UPDATE * (count_E - count_E.double().mean()).sign().float() for count_E in counts]
    assert not all(torch.equal(alone_E, expected_E) for alone_E in alone)  # one rank's load would not do


def assert_frozen_at_its_step(shown: list[dict[str, Tensor]]) -> None:
    *learning, last, later = shown
    assert [each["frozen"].item() for each in learning] == [0.0] * (FREEZES_AT - 1)
    for part in ("embedding", "centroids"):
        frozen = last[f"frozen_{part}"]
        assert not torch.equal(learning[0][f"light_{part}"], last[f"light_{part}"])
        assert torch.equal(frozen, last[f"light_{part}"])
        assert torch.equal(frozen, later[f"frozen_{part}"])
    assert last["frozen"] == later["frozen"] == 1.0
