"""GPUs and the assumptions of the roofline model. All numbers that a roofline rests on are here and in
`megamoe/costs/gpus.py`.

They stay as they are while code is compared with code. After a change here, earlier figures do not compare.
"""

from dataclasses import dataclass

from megamoe.costs.gpus import GPUS, Gpu

__all__ = ["ASSUMED", "GPUS", "RANKS_OF_A_NODE", "Assumptions", "Gpu"]


RANKS_OF_A_NODE = 8


@dataclass(frozen=True)
class Assumptions:
    """What share of a peak is reached, and what a launch and a wait cost. None of it was measured here.

    matmul, grouped_matmul, attention: of the peak FLOP/s. bytes, scattered_bytes: of the memory bandwidth, by
    passes over whole tensors and by rows at random places. link: of a link's bandwidth. kernel_s: from the
    end of one kernel to the beginning of the next. launch_s: the host's time for one operator in eager
    PyTorch; the device waits where its work is shorter. sync_s: from the end of what the host waits for to
    the next kernel. collective_s: start of a collective.
    """

    matmul: float = 0.70
    grouped_matmul: float = 0.55
    attention: float = 0.50
    bytes: float = 0.80
    scattered_bytes: float = 0.50
    link: float = 0.75
    kernel_s: float = 2e-6
    launch_s: float = 5e-6
    sync_s: float = 25e-6
    collective_s: float = 15e-6

    def lines(self) -> list[str]:
        """For a reader of the figures."""
        return [
            f"of the peak FLOP/s: matrix products {self.matmul:.0%}, grouped ones {self.grouped_matmul:.0%}, "
            f"flash attention {self.attention:.0%} (of its causal half)",
            f"of the memory bandwidth: {self.bytes:.0%}; rows at random places {self.scattered_bytes:.0%}",
            f"of the links: {self.link:.0%}, and {self.collective_s * 1e6:g} us to start; a node has "
            f"{RANKS_OF_A_NODE} GPUs; no collective runs beside other work",
            f"{self.kernel_s * 1e6:g} us between kernels, {self.launch_s * 1e6:g} us of the host for each "
            f"launch, {self.sync_s * 1e6:g} us for each wait of the host",
            "an operator reads its arguments once and writes its results once, unless "
            "megamoe/simulation/operators.py says otherwise; views cost nothing; TF32 is off",
            "model FLOPs: 3 x the matrix products of one forward pass under a balanced load",
        ]


ASSUMED = Assumptions()
