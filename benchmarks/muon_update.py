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

from megamoe.compat.startup import configure_libraries

configure_libraries()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from megamoe.config.schema import MuonConfig  # noqa: E402
from megamoe.kernels.adamw import AdamW  # noqa: E402
from megamoe.optim.matrices import matrices_of  # noqa: E402
from megamoe.optim.muon import Muon  # noqa: E402
from megamoe.optim.newton_schulz import flops, orthogonalise, step_rows  # noqa: E402
from megamoe.parallel import launch  # noqa: E402
from megamoe.parallel.chunks import Sharding  # noqa: E402
from megamoe.parallel.layout import Layout  # noqa: E402
from megamoe.parallel.zero.matrix_exchange import MatrixExchange, SplitWeight  # noqa: E402

SHARES = [(1,), (1, 1, 1), (1, 1), (1,)]  # of the matrices in the weights of a layer


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
    hidden = options.hidden
    of_layer = [(hidden, hidden), (3 * hidden, hidden), (options.experts, 2 * hidden, hidden)]
    of_layer.append((options.experts, hidden, hidden))
    weights = [nn.Parameter(torch.randn(shape)) for shape in of_layer * options.layers]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    runs, batches = make_runs(weights)
    times = measured(runs, options.rounds)
    work = sum(len(batch) * flops(batch.shape[1], batch.shape[2], MuonConfig().steps) for batch in batches)
    products = statistics.median(times["Newton-Schulz products"])
    print(f"{sum(map(len, batches))} matrices, {work / 1e9:.1f} GFLOP, {torch.get_num_threads()} threads")
    for name, found in times.items():
        spread = f"{min(found) * 1e3:.1f} to {max(found) * 1e3:.1f}"
        median = statistics.median(found)
        print(f"{name:24} {1e3 * median:8.1f} ms ({spread}), {median / products:.2f} of the products")
    print(f"products: {work / products / 1e9:.1f} GFLOP/s")
    launch.stop()


def make_runs(weights: list[nn.Parameter]) -> tuple[dict[str, Callable[[], object]], list[Tensor]]:
    """Return what is timed, and the batches of matrices."""
    config = MuonConfig()
    rows, muon = step_rows(config), Muon(config)
    split = [
        SplitWeight(
            name=f"w{place}",
            matrices=matrices_of(weight.shape[-2], weight.shape[-1], 1, SHARES[place % len(SHARES)]),
            is_expert=weight.dim() == 3,
            sharding=Sharding(),
            local_shape=tuple(weight.shape),
            starts=None,
            tensor=weight,
            at=0,
        )
        for place, weight in enumerate(weights)
    ]
    assert dist.group.WORLD is not None
    exchange = MatrixExchange(split, Layout(1), dist.group.WORLD, rows, torch.float32)
    muon.solver = exchange
    batches = [torch.randn(sizes) for sizes in exchange._make_plan(split).batches]
    group = {"params": weights, "lr": 1e-4, "weight_decay": 0.1}
    state = torch.optim.SGD(weights, lr=1e-4)
    adamw = AdamW([{"params": weights}], lr=1e-4, weight_decay=0.1, fused=True)
    runs: dict[str, Callable[[], object]] = {
        "Newton-Schulz products": lambda: [orthogonalise(batch, rows) for batch in batches],
        "Muon's update": lambda: muon.step(state, [group], 0.5),
        "AdamW's update": lambda: adamw.update(0.5),
    }
    return runs, batches


def measured(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each run in each round but the first; the runs take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for turn in range(rounds + 1):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                if turn:
                    times[name].append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
