"""The time of Muon's update on one rank against that of its Newton-Schulz products alone.

    python benchmarks/muon_update.py                   # a model of 8 experts, on the CPU
    python benchmarks/muon_update.py --hidden 512 --experts 16 --rounds 9

The products are those of the same matrices in the same batches: no momentum, no gathering,
no decay. AdamW's update of the same weights, at ZeRO 0 with the compiled kernel, stands beside them.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from megamoe.config.schema import MuonConfig
from megamoe.kernels.adamw import AdamW
from megamoe.optim.matrices import matrices_of
from megamoe.optim.muon import Muon
from megamoe.optim.newton_schulz import flops, orthogonalise, step_rows
from megamoe.parallel import launch
from megamoe.parallel.chunks import Sharding
from megamoe.parallel.layout import Layout
from megamoe.parallel.zero.matrix_exchange import MatrixExchange, SplitWeight


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    launch.start(launch.find_world(), 1)
    hidden, ffn, experts = options.hidden, options.hidden, options.experts
    shapes = [(hidden, hidden), (3 * hidden, hidden), (experts, 2 * ffn, hidden), (experts, hidden, ffn)]
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes * options.layers]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    config = MuonConfig()
    rows = step_rows(config)
    shares = [(1,), (1, 1, 1), (1, 1), (1,)] * options.layers
    split = [
        SplitWeight(
            f"w{place}",
            matrices_of(*weight.shape[-2:], 1, share),
            weight.dim() == 3,
            Sharding(),
            tuple(weight.shape),
            None,
            weight,
            0,
        )
        for place, (weight, share) in enumerate(zip(weights, shares, strict=True))
    ]
    muon = Muon(config)
    muon.solver = MatrixExchange(split, Layout(1), torch.distributed.group.WORLD, rows, torch.float32)
    group = {"params": weights, "lr": 1e-4, "weight_decay": 0.1}
    optimizer = torch.optim.SGD(weights, lr=1e-4)  # holds the state
    batches = [torch.randn(sizes) for sizes in muon.solver._make_plan(split).batches]
    adamw = AdamW([{"params": weights}], lr=1e-4, weight_decay=0.1, fused=True)
    runs: dict[str, Callable[[], object]] = {
        "Newton-Schulz products": lambda: [orthogonalise(batch, rows) for batch in batches],
        "Muon's update": lambda: muon.step(optimizer, [group], 0.5),
        "AdamW's update": lambda: adamw.update(0.5),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for turn in range(options.rounds + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if turn:
                    times[name].append(time.perf_counter() - start)
    work = sum(len(batch) * flops(*batch.shape[1:], config.steps) for batch in batches)
    products = statistics.median(times["Newton-Schulz products"])
    print(f"{sum(map(len, batches))} matrices, {work / 1e9:.1f} GFLOP, {torch.get_num_threads()} threads")
    for name, found in times.items():
        median = statistics.median(found)
        print(
            f"{name:24} {1e3 * median:8.1f} ms ({min(found) * 1e3:.1f} to {max(found) * 1e3:.1f}), "
            f"{median / products:.2f} of the products"
        )
    print(f"products: {work / products / 1e9:.1f} GFLOP/s")
    launch.stop()


if __name__ == "__main__":
    main()
