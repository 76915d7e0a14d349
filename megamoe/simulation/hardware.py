"""GPUs and the assumptions of the roofline model. All numbers that a roofline rests on are here.

They stay as they are while code is compared with code. After a change here, earlier figures do not compare.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU, from NVIDIA's data sheets, dense (without sparsity).

    bf16, fp32: FLOP/s of matrix products with tensor cores in bf16 or fp16, and in fp32 without them (TF32 is
    off by default in PyTorch). memory: bytes/s. nvlink, network: bytes/s of one direction, within a node of 8
    and between nodes.
    """

    name: str
    bf16: float
    fp32: float
    memory: float
    nvlink: float
    network: float

    def peak(self, dtype: str) -> float:
        """FLOP/s for products of that dtype."""
        return self.bf16 if dtype in ("bfloat16", "float16") else self.fp32


GPUS = {
    # NVIDIA A100 data sheet (SXM, 80 GB); NVLink 600 GB/s both ways; DGX A100: 200 Gb/s InfiniBand a GPU.
    "a100": Gpu("A100 SXM 80GB", 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
    # NVIDIA H100 data sheet (SXM): bf16 1,979 TFLOP/s with sparsity; NVLink 900 GB/s both ways; DGX H100:
    # 400 Gb/s InfiniBand a GPU.
    "h100": Gpu("H100 SXM", 989.5e12, 67e12, 3.35e12, 450e9, 50e9),
    # NVIDIA HGX B200 data sheet, of 8 GPUs: bf16 36 PFLOP/s with sparsity, fp32 600 TFLOP/s; memory 8 TB/s
    # and NVLink 1.8 TB/s both ways a GPU; DGX B200: 400 Gb/s InfiniBand a GPU.
    "b200": Gpu("B200 SXM", 2.25e15, 75e12, 8e12, 900e9, 50e9),
}

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
