"""The loss with rows that travel to their experts in 8 bits, beside rows in the model's dtype, by seed.

torchrun --nproc-per-node 2 benchmarks/fp8_exchange.py --config examples/demo.yaml --steps 300 --seeds 3 \
    parallel.expert=2 data.mock=true data.sources=[] model.vocab_size=512

The same ranks train every run, one after the other. Printed: the mean lm_loss of the last tenth of the steps,
and the difference to the first run of the seed.
"""

import argparse
import os
import sys
from pathlib import Path

from megamoe.config import load_config
from megamoe.train.trainer import Trainer

DTYPES = ("model", "fp8")


def last_loss(config: Path, overrides: list[str], steps: int) -> float:
    """Return the mean loss of the last tenth of the steps."""
    trainer = Trainer(load_config(config, overrides))
    losses = [float(trainer.step()[1]["train/lm_loss"]) for _ in range(steps)]
    trainer.release()
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def main(arguments: list[str]) -> int:
    """Train all runs; the first rank prints a row for each seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    asked = parser.parse_args(arguments)
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        print(f"{'seed':>4}" + "".join(f"{dtype:>10}" for dtype in DTYPES) + f"{'difference':>12}")
    for seed in range(1, asked.seeds + 1):
        common = [*asked.overrides, f"seed={seed}", f"train.steps={asked.steps}", "evaluation.batches=0"]
        found = [
            last_loss(asked.config, [*common, f"parallel.exchange_dtype={dtype}"], asked.steps)
            for dtype in DTYPES
        ]
        shown = "".join(f"{loss:10.4f}" for loss in found)
        if is_first:
            print(f"{seed:>4}{shown}{found[1] - found[0]:+12.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
