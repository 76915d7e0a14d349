"""The losses of 2,000 steps of three small models, and how far rounding moves them: `losses.json`.

    python -m tests.distributed.long_runs.curves              # trains all again and writes the file
    python -m tests.distributed.long_runs.curves top_2 fp32   # one model in one precision

Each is trained on one rank twice, with compiled kernels and with plain PyTorch, which round otherwise. The
losses do not depend on the size of a micro batch: the balance loss is that of each sequence, and every
sequence has as many tokens.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megamoe.train.trainer import Trainer
from tests.support.ranks.pool import Pool
from tests.support.ranks.runs import Place, ds_config, parallel_changes, small_run

STEPS, EVERY, BATCH = 2000, 50, 4
TIMES, LEAST = 4.0, 1e-4  # of the largest difference by rounding so far; of a loss
Array = npt.NDArray[np.float64]
STORED = Path(__file__).with_name("losses.json")
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"moe__layers": {"at": []}},
    "top_2": {
        "moe__router": {"scorer": "linear", "selector": {"name": "top_k", "k": 2}},
        "moe__losses": {"switch_balance": {"weight": 0.02, "scope": "sequence"}, "z_loss": 0.001},
    },
    "bias": {
        "moe__router": {
            "scorer": "linear",
            "score_function": {"name": "sigmoid", "bias_update": 0.001},
            "selector": {"name": "top_k", "k": 2},
        },
        "moe__losses": {},
    },
}
PRECISIONS = ("fp32", "bf16")
KERNELS = ("auto", "plain")
ALONE = Place(zero=1)
# On four ranks; a model without experts leaves their layout out.
LAYOUTS = (
    Place(4, tensor=2, sequence=True, expert=2, zero=2),
    Place(4, pipeline=2, expert=2, zero=1),
)


def train(model: str, precision: str, place: Place, kernels: str = "auto") -> list[float]:
    """Job: return the loss of 2,000 steps, the mean of every 50."""
    expert = 1 if model == "dense" else place.expert
    layout = parallel_changes(replace(place, expert=expert), ds_config(f"zero{place.zero}_{precision}"))
    always: dict[str, Any] = {
        "data__sequence_length": 16,
        "data__document_aware": False,
        "model__vocab_size": 64,
        "model__cpu_kernels": kernels,
        "moe__num_shared_experts": 0,
        "train__global_batch_size": BATCH,
        "train__micro_batch_size": BATCH // place.layout.data,
        "train__steps": STEPS,
    }
    trainer = Trainer(small_run(**(always | MODELS[model] | layout)))
    losses = [trainer.step()[1]["train/lm_loss"] for _ in range(STEPS)]
    trainer.release()
    means: list[float] = np.array(losses).reshape(-1, EVERY).mean(1).tolist()
    return means


def curve(pool: Pool, model: str, precision: str, place: Place, kernels: str = "auto") -> Array:
    """Return what `train` returns on the first rank."""
    return np.array(pool.run(train, model, precision, place, kernels, ranks=place.ranks, timeout_s=7200)[0])


def main(arguments: list[str]) -> None:
    """Train what the arguments name, or all, and write the file."""
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    pool = Pool()
    for model in MODELS:
        for precision in PRECISIONS:
            if not arguments or arguments == [model, precision]:
                losses, others = (curve(pool, model, precision, ALONE, kernels) for kernels in KERNELS)
                by_rounding = np.maximum.accumulate(np.abs(others - losses))
                bounds = np.maximum(TIMES * by_rounding, LEAST * losses)
                named = {"losses": losses, "bounds": bounds}
                rounded = {name: np.round(values, 6).tolist() for name, values in named.items()}
                stored[f"{model} {precision}"] = rounded
                STORED.write_text(json.dumps(stored) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
