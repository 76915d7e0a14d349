"""Peak rates and memory of GPUs, from their makers' data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """Peak rates of one GPU, from its maker's data sheet, dense (without sparsity).

    bf16, fp32: FLOP/s of matrix products with tensor cores in bf16 or fp16, and in fp32 without them (TF32 is
    off by default in PyTorch). memory: bytes/s. nvlink, network: bytes/s of one direction, within a node of 8
    and between nodes. capacity: bytes of its memory.
    """

    name: str
    bf16: float
    fp32: float
    memory: float
    nvlink: float
    network: float
    capacity: float = 80e9

    def peak(self, dtype: str) -> float:
        """Return the peak FLOP/s for products of that dtype."""
        return self.bf16 if dtype in ("bfloat16", "float16", "bf16", "fp16") else self.fp32


GPUS = {
    # NVIDIA A100 data sheet (SXM, 80 GB); NVLink 600 GB/s both ways; DGX A100: 200 Gb/s InfiniBand a GPU.
    "a100": Gpu("A100 SXM 80GB", 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
    # NVIDIA H100 data sheet (SXM): bf16 1,979 TFLOP/s with sparsity; NVLink 900 GB/s both ways; DGX H100:
    # 400 Gb/s InfiniBand a GPU.
    "h100": Gpu("H100 SXM", 989.5e12, 67e12, 3.35e12, 450e9, 50e9),
    # NVIDIA HGX B200 data sheet, of 8 GPUs: bf16 36 PFLOP/s with sparsity, fp32 600 TFLOP/s; memory 8 TB/s
    # and NVLink 1.8 TB/s both ways a GPU; DGX B200: 400 Gb/s InfiniBand a GPU.
    "b200": Gpu("B200 SXM", 2.25e15, 75e12, 8e12, 900e9, 50e9, 180e9),
    # NVIDIA H200 data sheet (SXM): as the H100 SXM, with 141 GB of memory at 4.8 TB/s.
    "h200": Gpu("H200 SXM", 989.5e12, 67e12, 4.8e12, 450e9, 50e9, 141e9),
    # AMD Instinct MI300X data sheet: bf16 1,307.4 and fp32 163.4 TFLOP/s of matrices, 192 GB at 5.3 TB/s,
    # seven Infinity Fabric links of 128 GB/s both ways; 400 Gb/s InfiniBand or Ethernet a GPU.
    "mi300x": Gpu("MI300X", 1307.4e12, 163.4e12, 5.3e12, 448e9, 50e9, 192e9),
}
# Words of a device's name as CUDA gives it -> its entry.
# PCIe and NVL cards, and a part of a GPU (MIG, virtual GPUs), have the same words and lower peaks.
NAMES = {"A100": "a100", "H100": "h100", "H200": "h200", "B200": "b200"}
SLOWER = ("PCIE", "NVL", "MIG", "GRID")


def gpu_of_device(name: str) -> Gpu | None:
    """Return the GPU by its name (`torch.cuda.get_device_name`), None if unknown."""
    words = name.upper().replace("-", " ").split()
    found = next((NAMES[word] for word in words if word in NAMES), None)
    if found is None or any(slower in word for word in words for slower in SLOWER):
        return None
    return GPUS[found]


def peak_of_device(name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device by its name (`torch.cuda.get_device_name`), None if unknown.

    precision: of the run: fp32, bf16 or fp16.
    """
    found = gpu_of_device(name)
    return None if found is None else found.peak(precision)
