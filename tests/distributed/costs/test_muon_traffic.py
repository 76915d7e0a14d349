"""What Muon sends and computes in a step is what the start-up table says, and what the layout asks for."""

from pathlib import Path
from typing import Any

import pytest

from megamoe.optim.matrices import takes_muon
from megamoe.parallel.zero.matrix_exchange import MuonCosts
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place, small_run

RUN: dict[str, Any] = {"optimizer__name": "muon", "train__global_batch_size": 4}


def measured(runs: list[dict[str, Any]]) -> list[tuple[int, MuonCosts, int]]:
    """Job: (bytes sent in a step, the costs that are told, elements in matrices on this rank) of each run."""
    found = []
    for changes in runs:
        trainer = Trainer(small_run(**changes))
        exchange = trainer.engine.inner_optimizer.muon.solver  # type: ignore[attr-defined]
        trainer.step()
        shapes = [each for each in trainer.engine.model.named_parameters() if takes_muon(*each)]
        numel = sum(getattr(parameter, "ds_numel", parameter.numel()) for _, parameter in shapes)
        found.append((exchange.sent_bytes, trainer.engine.muon_costs(), numel))
        trainer.release()
    return found  # type: ignore[return-value]


def test_bytes_and_work(pool: Pool, tmp_path: Path) -> None:
    places = [Place(2, zero=stage) for stage in (0, 1, 3)] + [Place(2, expert=2)]
    runs = [{**RUN, **place.changes(tmp_path)} for place in places]
    one, other = pool.run(measured, runs, ranks=2)
    for place, mine, theirs in zip(places, one, other, strict=True):
        (sent, costs, numel), (sent_too, costs_too, _) = mine, theirs
        if place.zero == 0:  # all in one call, as the table has it
            assert (sent, sent_too) == (costs.sent_bytes, costs_too.sent_bytes)
        if place.expert == 1:
            assert costs.matrices == costs_too.matrices == costs.own + costs_too.own
            assert costs.flops == pytest.approx(costs_too.flops, rel=0.1)
        if place == places[0]:  # each matrix goes from its owner to the other replica
            assert sent + sent_too == 4 * numel
        elif place.expert == 1:  # of each matrix the part that its owner lacks comes and goes
            assert sent + sent_too == pytest.approx(2 * 4 * numel / 2, rel=0.35)
        else:  # experts are where their owners are
            assert 0 < sent + sent_too < 4 * numel / 2
