"""What Muon sends in a step is what the layout asks for."""

import math
from pathlib import Path
from typing import Any

import pytest
from deepspeed.moe.utils import is_moe_param

from megamoe.compat.deepspeed_zero import whole_shape
from megamoe.optim.matrices import takes_muon
from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place, small_run

RUN: dict[str, Any] = {"optimizer__name": "muon", "train__global_batch_size": 4}


def measured(runs: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Job: (bytes sent in a step, elements of this rank in dense matrices and in experts) of each run."""
    found: list[Any] = []
    for changes in runs:
        trainer = Trainer(small_run(**changes))
        exchange = trainer.engine.inner_optimizer.muon.solver  # type: ignore[attr-defined]
        trainer.step()
        numel = [0, 0]
        for name, parameter in trainer.engine.model.named_parameters():
            if takes_muon(name, parameter):
                numel[is_moe_param(parameter)] += math.prod(whole_shape(parameter))
        found.append((exchange.sent_bytes, *numel))
        trainer.release()
    return found


def test_bytes(pool: Pool, tmp_path: Path) -> None:
    places = [Place(2, zero=stage) for stage in (0, 1, 3)] + [Place(2, expert=2)]
    runs = [{**RUN, **place.changes(tmp_path)} for place in places]
    one, other = pool.run(measured, runs, ranks=2)
    for place, mine, theirs in zip(places, one, other, strict=True):
        (sent, dense, experts), (sent_too, *_) = mine, theirs
        both = sent + sent_too
        if place.expert == 2:  # the experts are with their owners
            assert both == 4 * dense
        elif place.zero == 0:  # each matrix goes from its owner to the other replica
            assert both == 4 * (dense + experts)
        else:  # of each matrix the part that its owner lacks comes and goes, half on average
            assert both == pytest.approx(4 * (dense + experts), rel=0.5) and sent * sent_too > 0
